"""Workers that stand still for longer than their lease and then go on as if nothing had been."""

from pathlib import Path

import pytest

from tests.chaos.scenario import stops
from tests.chaos.stage import Setup
from tests.chaos.subject import tried


@pytest.mark.parametrize("contract", tried())
async def test_late_writes_of_a_stopped_holder_are_refused_and_others_do_its_jobs(
    tmp_path: Path, contract: str
) -> None:
    setup = Setup(folder=tmp_path, contract=contract, seed=2, jobs=100, lease_ms=1_000)
    report = await stops(setup)
    assert report.ok, str(report)
    assert report.counts["stale writes refused"] >= 6
