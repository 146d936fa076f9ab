"""A plane's workers without their network; `python -m tests.chaos long-cuts` takes 10 to 90 s."""

from pathlib import Path

from tests.chaos.cuts import cuts
from tests.chaos.stage import Setup


async def test_a_worker_that_is_cut_off_stops_and_its_jobs_run_elsewhere(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, contract="plane", seed=4, jobs=40, lease_ms=3_000)
    report = await cuts(setup)
    assert report.ok, str(report)
