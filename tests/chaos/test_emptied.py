"""The store comes back without its data."""

from pathlib import Path

import pytest

from tests.chaos.scenario import emptied
from tests.chaos.stage import Setup
from tests.chaos.subject import ON_REDIS, tried


@pytest.mark.parametrize("contract", [name for name in tried() if name in ON_REDIS])
async def test_workers_and_gateway_go_on_with_an_emptied_store_without_a_restart(
    tmp_path: Path, contract: str
) -> None:
    report = await emptied(Setup(folder=tmp_path, contract=contract, seed=7, jobs=120, workers=2))
    assert report.ok, str(report)
