"""Jobs that kill whoever runs them."""

from pathlib import Path

import pytest

from tests.chaos.scenario import poison
from tests.chaos.stage import Setup
from tests.chaos.subject import tried

# Every death is followed by a start, which is measured: nobody else may take the processor.
pytestmark = pytest.mark.alone


@pytest.mark.parametrize("contract", tried())
async def test_poison_ends_as_lease_lost_at_its_limit_and_healthy_jobs_finish(
    tmp_path: Path, contract: str
) -> None:
    setup = Setup(
        folder=tmp_path, contract=contract, seed=6, jobs=200, concurrency=4, lease_ms=1_000
    )
    report = await poison(setup, poisons=2, lost_max=3)
    assert report.ok, str(report)


@pytest.mark.parametrize("contract", tried())
async def test_poison_that_kills_at_once_does_not_take_its_neighbours_along(
    tmp_path: Path, contract: str
) -> None:
    setup = Setup(
        folder=tmp_path, contract=contract, seed=2, jobs=150, concurrency=4, lease_ms=1_000
    )
    report = await poison(setup, poisons=2, lost_max=3, after_ms=0)
    assert report.ok, str(report)
