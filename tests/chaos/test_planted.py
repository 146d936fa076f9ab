"""The harness itself: a fault planted in the scripts must make its verdict fail."""

from pathlib import Path

import pytest

from tests.chaos.planted import EVERY, PLANTED, SCRIPTS, plant, planted
from tests.chaos.report import Report
from tests.chaos.scenario import blocking, kills, latecomers, lost_replies
from tests.chaos.stage import Setup


def found(report: Report, *any_of: str) -> bool:
    return not report.ok and bool(set(any_of) & set(report.broken))


@pytest.mark.parametrize("contract", PLANTED)
async def test_without_a_fence_latecomers_end_in_stale_accepts(
    tmp_path: Path, contract: str
) -> None:
    """BullMQ's data has no trace of a job's past holders: there it takes a rival at work."""
    for seed in range(8, 13):
        setup = Setup(
            folder=tmp_path / str(seed),
            contract=contract,
            seed=seed,
            jobs=24,
            workers=2,
            lease_ms=1_000,
            planted="no-fence",
        )
        report = await latecomers(setup)
        if found(report, "I8"):
            break
    assert found(report, "I8"), str(report)
    assert found(report, "stale owners wrote, and all were refused"), str(report)
    assert f"--seed {seed}" in str(report)
    assert "--planted no-fence" in str(report)


@pytest.mark.parametrize(
    ("contract", "fault", "signs"),
    [
        ("streams", "no-reclaim", ("I1",)),
        ("bullmq", "no-reclaim", ("I1",)),
        ("omniq", "no-reclaim", ("I1",)),
        ("bullmq", "half-reclaim", ("I4", "I5", "I7")),
    ],
)
async def test_without_a_whole_reclaim_the_kills_end_in_lost_or_doubled_jobs(
    tmp_path: Path, contract: str, fault: str, signs: tuple[str, ...]
) -> None:
    setup = Setup(
        folder=tmp_path,
        contract=contract,
        seed=9,
        jobs=200,
        workers=2,
        patience_s=5,
        planted=fault,
    )
    report = await kills(setup, worker=2, gateway=1, store=0, stop=0)
    assert found(report, *signs), str(report)


@pytest.mark.parametrize("contract", PLANTED)
async def test_a_forgetful_submit_ends_in_doubled_jobs(tmp_path: Path, contract: str) -> None:
    with planted(contract, "forgetful-submit"):
        setup = Setup(folder=tmp_path, contract=contract, seed=10, jobs=40, workers=1, patience_s=8)
        report = await lost_replies(setup, each=3)
    assert found(report, "I4", "each was stored once, and nothing else was"), str(report)


async def test_an_extend_that_extends_nothing_ends_in_leases_lost_for_no_reason(
    tmp_path: Path,
) -> None:
    setup = Setup(
        folder=tmp_path,
        contract="bullmq",
        seed=4,
        jobs=12,
        workers=2,
        concurrency=4,
        lease_ms=1_000,
        planted="idle-extend",
        patience_s=5,
    )
    report = await blocking(setup)
    assert found(report, "blocked handlers kept their lease to the end"), str(report)


@pytest.mark.parametrize(("contract", "fault"), EVERY)
def test_a_planted_fault_is_gone_when_its_block_ends(contract: str, fault: str) -> None:
    scripts = SCRIPTS[contract]
    before = dict(scripts)
    with planted(contract, fault):
        assert before != scripts
        with pytest.raises(SystemExit, match="does not fit"):
            plant(contract, fault)
    assert before == scripts
