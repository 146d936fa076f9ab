"""Operators: cancel, remove, drain, clean, logs."""

import pytest

from leasehold.core.errors import NotFound
from leasehold.core.lease import Lease
from leasehold.core.outcome import CANCELLED, Outcome
from tests.contract.bullmq.conftest import Bench


@pytest.mark.clause("B-36")
async def test_a_cancelled_job_is_failed_and_says_why(bench: Bench) -> None:
    waiting = await bench.producer().add("work")
    ledger, queue = bench.ledger(), bench.queue()
    assert await ledger.cancel([waiting, "no-such"]) == ["ok", "missing"]
    assert bench.ids("failed") == [waiting]
    assert bench.hash(waiting)["failedReason"] == "cancelled"
    assert "atm" not in bench.hash(waiting) or bench.hash(waiting)["atm"] == "0"
    running = await bench.producer().add("work")
    (lease,) = await queue.claim(1, wait_ms=100)
    assert await ledger.cancel([running]) == ["requested"]
    (told,) = await queue.extend([lease])
    assert isinstance(told, Lease)
    assert told.cancel_requested
    assert await queue.settle([Outcome(told, "cancel")]) == [CANCELLED]
    assert set(bench.ids("failed")) == {waiting, running}


@pytest.mark.clause("B-35", "B-37", "B-38")
async def test_jobs_are_sent_back_removed_and_promoted(bench: Bench) -> None:
    producer, ledger, queue = bench.producer(), bench.ledger(), bench.queue()
    job_id = await producer.add("work")
    (lease,) = await queue.claim(1, wait_ms=100)
    await queue.settle([Outcome(lease, "complete", b"1")])
    assert await ledger.retry([job_id]) == ["ok"]
    stored = bench.hash(job_id)
    assert not {"finishedOn", "returnvalue", "atm"} & stored.keys()
    assert await ledger.remove([job_id]) == ["ok"]
    assert bench.hash(job_id) == {}
    late = await producer.add("work", {}, delay=60_000, priority=4)
    assert await ledger.promote([late, "no-such"]) == ["ok", "missing"]
    assert bench.ids("prioritized") == [late]


@pytest.mark.clause("B-41")
async def test_draining_leaves_what_runs_and_what_keeps_schedulers_alive(bench: Bench) -> None:
    producer, ledger, queue = bench.producer(), bench.ledger(), bench.queue()
    running = await producer.add("work")
    await queue.claim(1, wait_ms=100)
    await producer.add_bulk([("work", {}, {"priority": n % 2}) for n in range(6)])
    late = await producer.add("work", {}, delay=60_000)
    ticking = await producer.upsert_scheduler("tick", every=60_000, name="work")
    assert await ledger.drain() == 6
    assert bench.ids("wait") == [ticking]
    assert bench.ids("active") == [running]
    assert bench.ids("delayed") == [late]
    assert await ledger.drain(delayed=True) == 1


@pytest.mark.clause("B-42")
async def test_cleaning_takes_the_old_ones_up_to_a_number(bench: Bench) -> None:
    producer, ledger, queue = bench.producer(), bench.ledger(), bench.queue()
    await producer.add_bulk([("work", {}, {}) for _ in range(5)])
    leases = await queue.claim(5, wait_ms=0)
    await queue.settle([Outcome(lease, "complete") for lease in leases])
    assert await ledger.clean("completed", older_ms=60_000) == []
    assert len(await ledger.clean("completed", limit=2)) == 2
    assert len(await ledger.clean("completed")) == 3
    assert [event["count"] for event in bench.events() if event["event"] == "cleaned"] == [
        *("0", "2", "3"),
    ]


@pytest.mark.clause("B-46")
async def test_a_job_keeps_as_many_lines_of_its_log_as_asked(bench: Bench) -> None:
    job_id = await bench.producer().add("work", keep_logs=2)
    ledger = bench.ledger()
    for n in range(4):
        await ledger.log(job_id, f"line {n}", keep=2)
    assert await ledger.logs(job_id) == ["line 2", "line 3"]
    with pytest.raises(NotFound):
        await ledger.log("no-such", "a log that nobody would ever remove")
