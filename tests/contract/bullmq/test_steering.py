"""Operators: cancel, remove, drain, clean, logs."""

import pytest

from tenure.core.errors import NotFound, UsageError
from tenure.core.lease import Lease
from tenure.core.outcome import CANCELLED, Failure, Outcome
from tests.chaos.verdict import check
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


@pytest.mark.clause("B-49")
async def test_a_delayed_job_can_be_brought_forward_or_put_off(bench: Bench) -> None:
    ledger, queue = bench.ledger(), bench.queue()
    late = await bench.producer().add("work", {}, delay=60_000)
    waiting = await bench.producer().add("work")
    assert await ledger.change_delay([late, waiting, "no-such"], 90_000) == [
        *("ok", "waiting", "missing"),
    ]
    record = await ledger.get(late)
    assert record is not None
    assert 25_000 < record.due_ms - record.created_ms - 60_000 < 35_000
    assert await ledger.change_delay([late], 0) == ["ok"]
    leases = await queue.claim(5, wait_ms=500)
    assert {lease.job_id for lease in leases} == {late, waiting}
    with pytest.raises(UsageError, match="negative"):
        await ledger.change_delay([late], -1)
    verdict = check(await bench.journal().read(), quiesced=False)
    assert verdict.ok, f"a history with a changed delay is sound: {verdict}"


@pytest.mark.clause("B-50", "B-47")
async def test_a_changed_priority_moves_a_waiting_job_and_its_history_says_so(
    bench: Bench,
) -> None:
    producer, ledger, queue = bench.producer(), bench.ledger(), bench.queue()
    first, second, third = [await producer.add("work", {}, priority=5) for _ in range(3)]
    assert await ledger.change_priority([third], 1) == ["ok"]
    assert await ledger.change_priority([second], 5, first=True) == ["ok"]
    assert bench.ids("prioritized") == [third, second, first]
    assert await ledger.change_priority([first], 0) == ["ok"]
    leases = await queue.claim(5, wait_ms=0)
    assert [lease.job_id for lease in leases] == [first, third, second]
    assert leases[1].priority == 1
    await queue.settle([Outcome(lease, "complete") for lease in leases])
    assert await ledger.change_priority([first, "no-such"], 3) == ["completed", "missing"]
    events = [event for event in await bench.journal().read() if event.job_id == first]
    steps = [(event.type, event.from_state, event.to_state) for event in events]
    assert steps[:3] == [
        ("submit", "", "prioritized"),
        ("promote", "prioritized", "waiting"),
        ("claim", "waiting", "active"),
    ]
    assert [event.ver for event in events] == [1, 2, 3, 4]
    with pytest.raises(UsageError, match="priority"):
        await ledger.change_priority([first], 2**21)


@pytest.mark.clause("B-35")
async def test_all_failed_jobs_are_sent_back_at_once(bench: Bench) -> None:
    producer, ledger, queue = bench.producer(), bench.ledger(), bench.queue()
    await producer.add_bulk([("work", {}, {}) for _ in range(1_200)])
    broken = Failure(code="Broken", message="it broke")
    while leases := await queue.claim(500, wait_ms=0):
        await queue.settle([Outcome(lease, "bury", failure=broken) for lease in leases])
    assert await ledger.retry_all("failed", before_ms=1) == 0
    assert await ledger.retry_all() == 1_200
    assert (await ledger.counts()).states["waiting"] == 1_200
    (lease,) = await queue.claim(1, wait_ms=0)
    assert (lease.job_id, lease.attempt) == ("1", 2)
    assert "failedReason" not in bench.hash("1")
    with pytest.raises(UsageError, match="failed or completed"):
        await ledger.retry_all("active")


@pytest.mark.clause("B-38")
async def test_all_delayed_jobs_are_brought_forward_at_once(bench: Bench) -> None:
    producer, ledger = bench.producer(), bench.ledger()
    for n in range(3):
        await producer.add("work", {}, delay=60_000 + n)
    assert await ledger.promote_all() == 3
    assert bench.ids("wait") == ["3", "2", "1"]
    assert bench.ids("delayed") == []
