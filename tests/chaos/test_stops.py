"""Workers that stand still for longer than their lease and then go on as if nothing had been."""

from pathlib import Path

from tests.chaos.scenario import stops
from tests.chaos.stage import Setup


async def test_late_writes_of_a_stopped_holder_are_refused_and_others_do_its_jobs(
    tmp_path: Path,
) -> None:
    report = await stops(Setup(folder=tmp_path, seed=2, jobs=100, lease_ms=1_000))
    assert report.ok, str(report)
    assert report.counts["stale writes refused"] >= 6
