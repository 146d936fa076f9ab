"""Handlers that do not let their worker breathe."""

from pathlib import Path

import pytest

from tests.chaos.scenario import blocking
from tests.chaos.stage import Setup
from tests.chaos.subject import tried

# Whether a lease is kept is a question of time: nobody else may take the processor.
pytestmark = pytest.mark.alone


@pytest.mark.parametrize("contract", tried())
async def test_a_handler_that_blocks_for_three_leases_keeps_its_lease_and_runs_once(
    tmp_path: Path, contract: str
) -> None:
    """In the loop and in a thread, asleep and at work; an idle rival would take what ran out."""
    setup = Setup(
        folder=tmp_path,
        contract=contract,
        seed=4,
        jobs=30,
        workers=2,
        concurrency=4,
        lease_ms=1_500,
    )
    report = await blocking(setup)
    assert report.ok, str(report)
