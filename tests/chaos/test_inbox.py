"""The SQL inbox under kill -9 and stopped processes, on both engines."""

from pathlib import Path

import pytest

from tests.chaos.scenario import kills, poison, stops
from tests.chaos.stage import Setup


@pytest.mark.timeout(300)
@pytest.mark.clause("I-40", "I-7", "I-14")
async def test_four_processes_on_one_file_survive_kills_and_stops(tmp_path: Path) -> None:
    setup = Setup(
        folder=tmp_path,
        contract="inbox",
        lease_ms=2_500,
        seed=3,
        jobs=800,
        workers=3,
        patience_s=120,
    )
    report = await kills(setup)
    assert report.ok, str(report)


@pytest.mark.timeout(300)
@pytest.mark.clause("I-40", "I-7", "I-14")
async def test_eight_processes_on_postgres_survive_kills_of_worker_and_server(
    tmp_path: Path,
) -> None:
    setup = Setup(
        folder=tmp_path,
        contract="inbox_postgres",
        seed=3,
        jobs=1_000,
        workers=7,
        concurrency=4,
        lease_ms=6_000,
        fsync="always",
        patience_s=180,
    )
    report = await kills(setup, store=1)
    assert report.ok, str(report)


@pytest.mark.timeout(200)
@pytest.mark.clause("I-40", "I-11")
@pytest.mark.parametrize("contract", ["inbox", "inbox_postgres"])
async def test_late_writes_of_a_stopped_process_are_refused(tmp_path: Path, contract: str) -> None:
    setup = Setup(
        folder=tmp_path, contract=contract, seed=2, jobs=80, lease_ms=1_500, patience_s=90
    )
    report = await stops(setup, each=2)
    assert report.ok, str(report)
    assert report.counts["stale writes refused"] >= 2


@pytest.mark.timeout(200)
@pytest.mark.clause("I-10", "I-40")
@pytest.mark.parametrize("contract", ["inbox", "inbox_postgres"])
async def test_poison_is_a_dead_letter_at_its_claim_budget(tmp_path: Path, contract: str) -> None:
    setup = Setup(
        folder=tmp_path, contract=contract, seed=6, jobs=100, concurrency=4, lease_ms=1_500
    )
    report = await poison(setup, poisons=1, lost_max=3)
    assert report.ok, str(report)
