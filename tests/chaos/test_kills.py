"""kill -9 of everything, under load."""

from pathlib import Path

import pytest

from tests.chaos.scenario import kills
from tests.chaos.stage import Setup


@pytest.mark.timeout(300)
async def test_killing_worker_gateway_and_store_under_5000_jobs_loses_none(tmp_path: Path) -> None:
    """Several kills of each kind; half the jobs by HTTP; checked from the journal."""
    report = await kills(Setup(folder=tmp_path, seed=5, jobs=5_000, patience_s=120))
    assert report.ok, str(report)
    assert report.faults["kill worker"] >= 5
    assert report.faults["kill gateway"] >= 3
    assert report.faults["kill store"] >= 3
    assert report.counts["stale writes refused"] >= 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("contract", ["bullmq", "omniq"])
async def test_killing_worker_and_store_under_2000_jobs_without_a_gateway_loses_none(
    tmp_path: Path, contract: str
) -> None:
    """The same without an HTTP side; the store comes back on its append-only file."""
    setup = Setup(folder=tmp_path, contract=contract, seed=5, jobs=2_000, patience_s=120)
    report = await kills(setup, worker=5, store=3, stop=1)
    assert report.ok, str(report)
    assert (report.faults["kill worker"], report.faults["kill store"]) == (5, 3)
    assert report.counts["stale writes refused"] >= 1
