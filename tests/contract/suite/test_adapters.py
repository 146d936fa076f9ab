"""The suite itself: it covers every contract, and what a contract lacks is said openly."""

import pytest

from tenure.core.registry import contract_names
from tests.contract.adapters import CAPABILITIES, Servers, Stage, adapters
from tests.contract.suite.acting import job


def test_every_contract_folder_has_an_adapter() -> None:
    missing = set(contract_names()) - adapters(Servers()).keys()
    assert not missing, f"no adapter in tests/contract/adapters.py for: {', '.join(missing)}"


@pytest.mark.parametrize("name", contract_names())
def test_whatever_a_contract_cannot_do_has_a_reason(name: str) -> None:
    lacks = adapters(Servers())[name].cannot
    assert lacks.keys() <= CAPABILITIES.keys()
    assert all(len(reason.split()) > 3 for reason in lacks.values())


async def test_a_priority_that_a_contract_cannot_keep_is_refused(stage: Stage) -> None:
    """Better an answer that it cannot be than an order that nobody keeps."""
    (answer,) = await stage.queue().submit([job(priority=5)])
    assert answer.status == ("invalid" if "priority" in stage.cannot else "created")
