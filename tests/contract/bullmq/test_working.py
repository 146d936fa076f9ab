"""Claims, locks, progress, ends: what they leave in Redis."""

import asyncio
import json
import time

import pytest

from tenure.core.errors import LeaseLost, UsageError
from tenure.core.lease import Lease, Report
from tenure.core.outcome import BURIED, COMPLETED, Completed, Failure, Outcome, Retried
from tests.contract.bullmq.conftest import Bench

BROKEN = Failure(code="Broken", message="it broke", stack="Traceback\nBroken: it broke")


async def one(bench: Bench, **options: object) -> tuple[object, Lease]:
    """A job that runs: the queue and its lease."""
    await bench.producer().add("work", {}, **options)
    queue = bench.queue("w1")
    (lease,) = await queue.claim(1, wait_ms=1_000)
    return queue, lease


@pytest.mark.clause("B-8", "B-10")
async def test_a_claim_locks_the_job_and_says_who_has_it(bench: Bench) -> None:
    _, lease = await one(bench)
    stored = bench.hash(lease.job_id)
    assert (stored["ats"], stored["pb"], stored["workerId"]) == ("1", "w1", "w1")
    assert stored["processedOn"]
    assert bench.ids("active") == [lease.job_id]
    lock = bench.key(f"{lease.job_id}:lock")
    assert bench.raw.get(lock).decode() == f"{lease.token}:1"
    assert 29_000 < bench.raw.pttl(lock) <= 30_000
    event = bench.events()[-1]
    assert (event["event"], event["prev"], event["workerId"]) == ("active", "waiting", "w1")


@pytest.mark.clause("B-9")
async def test_a_claim_takes_many_in_one_step(bench: Bench) -> None:
    ids = await bench.producer().add_bulk([("work", {}, {}) for _ in range(40)])
    queue = bench.queue()
    await queue.claim(1, wait_ms=0)
    bench.raw.config_resetstat()
    leases = await queue.claim(100, wait_ms=0)
    assert [lease.job_id for lease in leases] == ids[1:]
    assert bench.raw.info("commandstats")["cmdstat_evalsha"]["calls"] == 1


@pytest.mark.clause("B-12")
async def test_upkeep_promotes_what_is_due_in_the_order_of_its_time(bench: Bench) -> None:
    producer, queue = bench.producer(), bench.queue()
    later = await producer.add("work", {}, delay=40)
    sooner = await producer.add("work", {}, delay=20)
    await asyncio.sleep(0.05)  # their time comes
    assert (await queue.upkeep()).promoted == 2
    assert bench.ids("wait") == [later, sooner]
    assert bench.hash(later)["delay"] == "0"


@pytest.mark.clause("B-18")
async def test_a_stolen_lock_is_told_and_nothing_changes(bench: Bench) -> None:
    queue, lease = await one(bench)
    bench.raw.set(bench.key(f"{lease.job_id}:lock"), "node-worker:1")
    before = bench.hash(lease.job_id)
    (verdict,) = await queue.settle([Outcome(lease, "complete")])  # type: ignore[attr-defined]
    (extended,) = await queue.extend([lease])  # type: ignore[attr-defined]
    (reported,) = await queue.report([Report(lease=lease, progress=b"5")])  # type: ignore[attr-defined]
    assert all(isinstance(each, LeaseLost) for each in (verdict, extended, reported))
    assert bench.hash(lease.job_id) == before
    assert bench.ids("active") == [lease.job_id]


@pytest.mark.clause("B-28")
async def test_a_lock_that_is_gone_sends_the_job_back_to_the_front(bench: Bench) -> None:
    queue, lease = await one(bench, priority=3)
    await bench.producer().add("work", {})
    bench.raw.delete(bench.key(f"{lease.job_id}:lock"))
    assert (await queue.upkeep()).reclaimed == 1  # type: ignore[attr-defined]
    assert bench.ids("wait")[-1] == lease.job_id
    assert bench.hash(lease.job_id)["stc"] == "1"
    assert [event["event"] for event in bench.events()[-2:]] == ["waiting", "stalled"]


@pytest.mark.clause("B-28", "B-17")
async def test_a_job_that_is_lost_too_often_fails_at_its_next_pickup(bench: Bench) -> None:
    job_id = await bench.producer().add("work", {}, attempts=5)
    queue = bench.queue()
    for _ in range(2):
        (lease,) = await queue.claim(1, wait_ms=1_000)
        assert lease.job_id == job_id
        bench.raw.delete(bench.key(f"{job_id}:lock"))
        await queue.upkeep()
    assert await queue.claim(1, wait_ms=50) == []
    assert bench.ids("failed") == [job_id]
    assert bench.hash(job_id)["failedReason"] == "job stalled more than allowable limit"


@pytest.mark.clause("B-28")
async def test_an_extend_renews_the_lock_when_a_third_of_it_is_spent(bench: Bench) -> None:
    await bench.producer().add("work")
    queue = bench.queue(lease_ms=400)
    (lease,) = await queue.claim(1, wait_ms=100)
    await asyncio.sleep(0.25)  # more than a third of the lease
    bench.raw.sadd(bench.key("stalled"), lease.job_id)
    (kept,) = await queue.extend([lease])
    assert isinstance(kept, Lease)
    assert bench.raw.pttl(bench.key(f"{lease.job_id}:lock")) > 300
    assert not bench.raw.exists(bench.key("stalled"))


@pytest.mark.clause("B-27")
async def test_an_id_without_a_job_does_not_stay_in_active(bench: Bench) -> None:
    bench.raw.lpush(bench.key("active"), "ghost")
    bench.raw.lpush(bench.key("wait"), "ghost-too")
    queue = bench.queue()
    assert (await queue.upkeep()).reclaimed == 0
    assert await queue.claim(5, wait_ms=0) == []
    assert bench.ids("active") == bench.ids("wait") == []


@pytest.mark.clause("B-19")
async def test_a_completed_job_keeps_its_result_and_the_queue_says_it_is_drained(
    bench: Bench,
) -> None:
    queue, lease = await one(bench)
    outcome = Outcome(lease, "complete", b'{"videoUrl":"x"}')
    assert await queue.settle([outcome]) == [COMPLETED]  # type: ignore[attr-defined]
    stored = bench.hash(lease.job_id)
    assert (stored["returnvalue"], stored["atm"]) == ('{"videoUrl":"x"}', "1")
    assert stored["finishedOn"]
    assert bench.ids("completed") == [lease.job_id]
    assert bench.ids("active") == []
    assert not bench.raw.exists(bench.key(f"{lease.job_id}:lock"))
    last = bench.events()[-2:]
    assert [event["event"] for event in last] == ["completed", "drained"]
    assert last[0]["returnvalue"] == '{"videoUrl":"x"}'


@pytest.mark.clause("B-20", "B-21")
async def test_failures_wait_by_their_backoff_until_no_attempt_is_left(bench: Bench) -> None:
    options = {"attempts": 3, "backoff": {"type": "exponential", "delay": 30}, "stackTraceLimit": 2}
    queue, lease = await one(bench, **options)
    waits = []
    for _ in range(2):
        (verdict,) = await queue.settle([Outcome(lease, "fail", failure=BROKEN)])  # type: ignore[attr-defined]
        assert isinstance(verdict, Retried)
        waits.append(int(bench.hash(lease.job_id)["delay"]))
        (lease,) = await queue.claim(1, wait_ms=1_000)  # type: ignore[attr-defined]
    assert waits == [30, 60]
    assert await queue.settle([Outcome(lease, "fail", failure=BROKEN)]) == [BURIED]  # type: ignore[attr-defined]
    stored = bench.hash(lease.job_id)
    assert (stored["atm"], stored["failedReason"]) == ("3", "it broke")
    assert json.loads(stored["stacktrace"]) == [BROKEN.stack] * 2
    events = [event for event in bench.events() if event["event"] != "drained"]
    assert [event["event"] for event in events[-2:]] == ["failed", "retries-exhausted"]
    assert events[-1]["attemptsMade"] == "3"


@pytest.mark.clause("B-25")
@pytest.mark.parametrize("keep", [True, 2, {"count": 2}, {"age": 3600, "count": 2}])
async def test_finished_jobs_are_kept_as_their_options_say(bench: Bench, keep: object) -> None:
    producer, queue = bench.producer(), bench.queue()
    for _ in range(5):
        await producer.add("work", {}, remove_on_complete=keep)
        (lease,) = await queue.claim(1, wait_ms=1_000)
        await queue.settle([Outcome(lease, "complete")])
    left = [] if keep is True else ["4", "5"]
    assert bench.ids("completed") == left
    jobs = {key.decode().split(":")[2] for key in bench.raw.keys(bench.key("[0-9]*"))}
    assert sorted(jobs) == left


@pytest.mark.clause("B-26")
async def test_a_resent_settle_of_a_removed_job_is_recognised(bench: Bench) -> None:
    queue, lease = await one(bench, removeOnComplete=True)
    outcome = Outcome(lease, "complete", b"1")
    for _ in range(3):
        assert await queue.settle([outcome]) == [COMPLETED]  # type: ignore[attr-defined]
    (other,) = await queue.settle([Outcome(lease, "bury", failure=BROKEN)])  # type: ignore[attr-defined]
    assert isinstance(other, LeaseLost)
    assert [event["event"] for event in bench.events()].count("completed") == 1


@pytest.mark.clause("B-24")
async def test_a_claim_whose_caller_went_away_is_handed_out_again_under_its_fence(
    bench: Bench,
) -> None:
    await bench.producer().add("work")
    queue = bench.queue()
    queue._claimer._reply_lost = True  # as after a call that ended without its answer
    (lease,) = await queue.claim(1, wait_ms=0)
    queue._claimer._held.clear()
    queue._claimer._reply_lost = True
    (again,) = await queue.claim(1, wait_ms=0)
    assert (again.job_id, again.fence, again.attempt) == (lease.job_id, 1, 1)
    assert isinstance((await queue.settle([Outcome(again, "complete")]))[0], Completed)


@pytest.mark.clause("B-29")
async def test_finished_jobs_are_counted_per_minute_when_asked(bench: Bench) -> None:
    await bench.producer().add_bulk([("work", {}, {}) for _ in range(5)])
    queue = bench.queue(metrics_minutes=3)
    leases = await queue.claim(5, wait_ms=0)
    await queue.settle([Outcome(lease, "complete") for lease in leases[:3]])
    key = bench.key("metrics:completed")
    assert bench.raw.hget(key, "count") == b"3"
    bench.raw.hset(key, "prevTS", int(time.time() * 1000) - 120_000)
    await queue.settle([Outcome(lease, "complete") for lease in leases[3:]])
    assert bench.raw.hget(key, "count") == b"5"
    points = [int(each) for each in bench.raw.lrange(f"{key}:data", 0, -1)]
    assert points[-1] == 3
    assert set(points[:-1]) == {0}


@pytest.mark.clause("B-30")
async def test_progress_stands_in_both_fields_and_a_percentage_is_one(bench: Bench) -> None:
    queue, lease = await one(bench)
    await queue.report([Report(lease=lease, progress=b"25")])  # type: ignore[attr-defined]
    event = bench.events()[-1]
    assert (event["event"], event["data"], event["progress"]) == ("progress", "25", "25")
    assert bench.hash(lease.job_id)["progress"] == "25"
    for wrong in (b"101", b"-1"):
        with pytest.raises(UsageError, match="0 to 100"):
            await queue.report([Report(lease=lease, progress=wrong)])  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="completed"):
        await queue.report([Report(lease=lease, type="completed")])  # type: ignore[attr-defined]


@pytest.mark.clause("B-47")
async def test_every_transition_is_in_the_journal(bench: Bench) -> None:
    queue, lease = await one(bench, attempts=2)
    await queue.settle([Outcome(lease, "fail", failure=BROKEN)])  # type: ignore[attr-defined]
    (lease,) = await queue.claim(1, wait_ms=100)  # type: ignore[attr-defined]
    await queue.settle([Outcome(lease, "complete", b"1")])  # type: ignore[attr-defined]
    events = await bench.journal().read()
    assert [event.type for event in events] == ["submit", "claim", "retry", "claim", "complete"]
    assert [event.ver for event in events] == [1, 2, 3, 4, 5]
    assert [event.fence for event in events] == [0, 1, 1, 2, 2]
    assert {event.queue for event in events} == {bench.name}
