"""The harness itself: a fault planted in the scripts must make its verdict fail."""

from pathlib import Path

import pytest

from leasehold.contracts.streams.queue import SCRIPTS
from tests.chaos.planted import PLANTED, plant, planted
from tests.chaos.report import Report
from tests.chaos.scenario import kills, lost_replies, stops
from tests.chaos.stage import Setup


def found(report: Report, *any_of: str) -> bool:
    return not report.ok and bool(set(any_of) & set(report.broken))


async def test_without_a_fence_the_stops_end_in_stale_accepts(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, seed=8, jobs=40, workers=2, lease_ms=1_000, planted="no-fence")
    report = await stops(setup, each=1)
    assert found(report, "I8"), str(report)
    assert found(report, "stale owners wrote, and all were refused"), str(report)
    assert "--seed 8" in str(report)
    assert "--planted no-fence" in str(report)


async def test_without_reclaim_the_kills_end_in_lost_jobs(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, seed=9, jobs=200, workers=2, patience_s=5, planted="no-reclaim")
    report = await kills(setup, worker=2, gateway=1, store=0, stop=0)
    assert found(report, "I1"), str(report)


async def test_a_forgetful_submit_ends_in_doubled_jobs(tmp_path: Path) -> None:
    with planted("forgetful-submit"):
        setup = Setup(folder=tmp_path, seed=10, jobs=40, workers=1, patience_s=8)
        report = await lost_replies(setup, each=3)
    assert found(report, "I4", "each was stored once, and nothing else was"), str(report)


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_gone_when_its_block_ends(fault: str) -> None:
    before = dict(SCRIPTS)
    with planted(fault):
        assert before != SCRIPTS
        with pytest.raises(SystemExit, match="does not fit"):
            plant(fault)
    assert before == SCRIPTS
