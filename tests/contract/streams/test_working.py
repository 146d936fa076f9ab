"""S-7 to S-23: what a worker's steps leave in Redis, and what dead or stale workers cannot do."""

from __future__ import annotations

import asyncio
import json

import pytest

from tenure.core.errors import LeaseLost, UsageError
from tenure.core.job import NewJob
from tenure.core.lease import Report
from tenure.core.outcome import Buried, Cancelled, Completed, Failure, Outcome, Released, Retried

BOOM = Failure(code="Boom", message="it broke", stack="line 1")


def new(job_id: str, **more: object) -> NewJob:
    return NewJob(task="chat", payload=b'{"n":1}', job_id=job_id, **more)  # type: ignore[arg-type]


async def submit_and_claim(bench, *job_ids: str, worker: str = "w1", **options: object):
    queue = bench.queue(worker, **options)
    await queue.submit([new(job_id) for job_id in job_ids])
    return queue, await queue.claim(len(job_ids), wait_ms=0)


@pytest.mark.clause("S-8")
async def test_a_claim_is_a_pending_entry_of_the_group_workers(bench):
    _, (lease,) = await submit_and_claim(bench, "j1")
    (entry,) = await bench.outside.xpending_range(bench.key("jobs:stream"), "workers", "-", "+", 10)
    assert entry["consumer"] == "w1"
    assert entry["message_id"] == lease.handle


@pytest.mark.clause("S-9", "S-10")
async def test_a_claimed_job_says_running_in_hash_and_events(bench):
    await submit_and_claim(bench, "j1")
    job = await bench.job("j1")
    assert job["status"] == "running"
    assert job["updated_ts"] >= job["created_ts"]
    assert await bench.event_types("j1") == ["queued", "running"]


@pytest.mark.clause("S-15", "S-14", "S-3")
async def test_success_leaves_result_event_and_no_pending_entry(bench):
    queue, (lease,) = await submit_and_claim(bench, "j1")
    assert await queue.settle([Outcome(lease, "complete", b'{"answer":42}')]) == [Completed()]
    job = await bench.job("j1")
    assert (job["status"], json.loads(job["result"]), job["error"]) == ("done", {"answer": 42}, "")
    assert await bench.event_types("j1") == ["queued", "running", "done"]
    assert await bench.pending() == 0


@pytest.mark.clause("S-16", "S-14", "S-3")
async def test_failure_leaves_error_event_and_no_pending_entry(bench):
    queue, (lease,) = await submit_and_claim(bench, "j1")
    assert await queue.settle([Outcome(lease, "fail", failure=BOOM)]) == [Buried()]
    job = await bench.job("j1")
    assert job["status"] == "error"
    assert json.loads(job["error"])["message"] == "it broke"
    assert job["result"] == ""
    assert await bench.event_types("j1") == ["queued", "running", "error"]
    assert await bench.pending() == 0


@pytest.mark.clause("S-14")
async def test_no_observer_sees_an_acknowledged_entry_without_its_terminal_event(bench):
    queue, leases = await submit_and_claim(bench, *(f"j{n}" for n in range(60)))
    stop = asyncio.Event()
    torn: list[tuple[int, int]] = []

    async def watch() -> None:
        while not stop.is_set():
            async with bench.outside.pipeline(transaction=True) as pipe:
                pipe.xpending(bench.key("jobs:stream"), "workers")
                for n in range(60):
                    pipe.xlen(bench.key(f"job:j{n}:events"))
                pending, *lengths = await pipe.execute()
            ended = sum(length == 3 for length in lengths)
            if pending["pending"] + ended != 60:
                torn.append((pending["pending"], ended))

    watcher = asyncio.create_task(watch())
    for start in range(0, 60, 3):
        await queue.settle([Outcome(lease, "complete") for lease in leases[start : start + 3]])
    stop.set()
    await watcher
    assert not torn


@pytest.mark.clause("S-7")
async def test_every_step_gives_both_keys_their_whole_time_to_live(bench):
    queue = bench.queue(lease_ms=300, ttl_s=100)
    await queue.submit([new("j1")])
    names = (bench.key("job:j1"), bench.key("job:j1:events"))

    async def shorten() -> None:
        for name in names:
            await bench.outside.expire(name, 10)

    async def ttls() -> list[int]:
        return [await bench.outside.ttl(name) for name in names]

    await shorten()
    (lease,) = await queue.claim(1, wait_ms=0)
    assert await ttls() == [100, 100], "claim"
    await shorten()
    await queue.report([Report(lease=lease, progress=b"1")])
    assert await ttls() == [100, 100], "report"
    await shorten()
    # The lease is kept, and the job with it, once a third of the lease is used up.
    while await ttls() != [100, 100]:
        (kept,) = await queue.extend([lease])
        assert not isinstance(kept, LeaseLost)
    await shorten()
    await queue.settle([Outcome(lease, "complete")])
    assert await ttls() == [100, 100], "settle"


@pytest.mark.clause("S-7")
async def test_a_settle_soon_after_its_claim_leaves_the_time_to_live_that_the_claim_gave(bench):
    queue = bench.queue(ttl_s=1000)
    await queue.submit([new("soon"), new("late"), new("short", ttl_ms=100_000)])
    leases = await queue.claim(3, wait_ms=0)
    soon, late, short = leases
    names = [bench.key(f"job:{lease.job_id}{more}") for lease in leases for more in ("", ":events")]
    for name in names:
        await bench.outside.expire(name, 10)
    await queue.settle([Outcome(soon, "complete"), Outcome(short, "complete")])
    claimed_s = late.extra.claimed_ms / 1000
    while (now := await bench.outside.time())[0] + now[1] / 1e6 < claimed_s + 0.5:
        await asyncio.sleep(0.05)  # the store's clock decides
    await queue.settle([Outcome(late, "complete")])
    ttls = [await bench.outside.ttl(name) for name in names]
    assert max(ttls[:2]) <= 10, "not written again"
    assert ttls[2:4] == [1000, 1000], "half a second later it is"
    assert min(ttls[4:]) > 90, "of a short life half a second counts"


@pytest.mark.clause("S-7")
@pytest.mark.parametrize("ttl_s", ["abc", "inf", "nan", "-5", "0", "1e400", ""])
async def test_a_foreign_time_to_live_that_is_none_stops_nobody_and_ends_nothing(bench, ttl_s):
    fields = {"status": "queued", "task": "chat", "payload": "{}", "ttl_s": ttl_s}
    await bench.outside.hset(bench.key("job:foreign"), mapping=fields)
    entry = {"job_id": "foreign", "task": "chat", "payload": "{}"}
    await bench.outside.xadd(bench.key("jobs:stream"), entry)
    queue = bench.queue(lease_ms=50)
    await queue.submit([new("ours")])
    leases = await queue.claim(10, wait_ms=0)
    assert [lease.job_id for lease in leases] == ["foreign", "ours"]
    await queue.extend(leases)
    for verdict in await queue.settle([Outcome(lease, "complete") for lease in leases]):
        assert isinstance(verdict, Completed)
    assert await bench.event_types("foreign") == ["running", "done"]
    assert await bench.outside.ttl(bench.key("job:foreign")) == -1
    stored = await bench.ledger().get("foreign")
    assert stored is not None
    assert stored.state == "done"


@pytest.mark.clause("S-11")
async def test_jobs_that_were_queued_before_any_group_existed_are_not_skipped(bench):
    await bench.queue("producer").submit([new("j1"), new("j2")])
    leases = await bench.queue().claim(10, wait_ms=0)
    assert [lease.job_id for lease in leases] == ["j1", "j2"]


@pytest.mark.clause("S-11", "S-18")
async def test_a_lost_group_is_made_again_and_finished_jobs_do_not_run_twice(bench):
    queue, leases = await submit_and_claim(bench, "j1", "j2", lease_ms=1000)
    stream = bench.key("jobs:stream")
    kept = (await bench.outside.xrange(stream))[0][1]
    await queue.settle([Outcome(leases[0], "complete")])
    await bench.outside.xadd(stream, kept)  # as if the finished job's entry had survived
    await bench.outside.xgroup_destroy(stream, "workers")
    other, claimed = bench.queue("w2", lease_ms=100), []
    while not claimed:
        claimed = await other.claim(10, wait_ms=100)
    assert [lease.job_id for lease in claimed] == ["j2"]
    # Its holder may be alive: nobody takes it before its time.
    assert claimed[0].lease_until_ms - 100 >= leases[1].lease_until_ms
    assert await bench.event_types("j1") == ["queued", "running", "done"]


@pytest.mark.clause("S-11", "S-14")
async def test_a_worker_whose_group_was_lost_under_it_still_ends_its_job(bench):
    queue, (lease,) = await submit_and_claim(bench, "j1", lease_ms=60_000)
    await bench.outside.xgroup_destroy(bench.key("jobs:stream"), "workers")
    assert await bench.queue("w2", lease_ms=60_000).claim(10, wait_ms=0) == []
    assert await queue.settle([Outcome(lease, "complete")]) == [Completed()]
    assert await bench.pending() == 0
    assert await bench.outside.xlen(bench.key("jobs:stream")) == 0


@pytest.mark.clause("S-12")
async def test_a_claim_takes_new_entries_and_those_of_a_dead_worker_in_one_go(bench):
    _, (dead,) = await submit_and_claim(bench, "j1", worker="dead", lease_ms=100)
    queue = bench.queue("w2", lease_ms=100)
    await queue.submit([new("j2")])
    await bench_until_expired(bench, dead)
    claimed = await queue.claim(10, wait_ms=1000)
    assert [lease.job_id for lease in claimed] == ["j1", "j2"]
    assert [lease.attempt for lease in claimed] == [2, 1]


@pytest.mark.clause("S-13")
async def test_a_job_that_kills_its_workers_ends_in_error_with_a_reason(bench):
    queue = bench.queue(lease_ms=60, lost_max=2)
    await queue.submit([new("poison")])
    starts = 0
    while (await bench.job("poison"))["status"] in ("queued", "running"):
        starts += len(await bench.queue(f"w{starts}", lease_ms=60, lost_max=2).claim(1, wait_ms=80))
    error = json.loads((await bench.job("poison"))["error"])
    assert starts == 2
    assert error["code"] == "lease_lost"
    assert "ran out 2 time(s)" in error["message"]
    assert (await bench.event_types("poison"))[-1] == "error"
    assert await bench.pending() == 0


@pytest.mark.clause("S-17")
@pytest.mark.parametrize(
    "kind", ["complete", "fail", "retry", "bury", "snooze", "release", "cancel"]
)
async def test_an_outcome_sent_again_gets_the_same_verdict_and_changes_nothing(bench, kind):
    queue, (lease,) = await submit_and_claim(bench, "j1")
    outcome = Outcome(lease, kind, b'{"a":1}', failure=BOOM, delay_ms=60_000)
    first = await queue.settle([outcome])
    before, events = await bench.job("j1"), await bench.event_types("j1")
    assert await queue.settle([outcome]) == first
    assert not isinstance(first[0], LeaseLost)
    assert await bench.job("j1") == before
    assert await bench.event_types("j1") == events


@pytest.mark.clause("S-17")
async def test_a_retry_sent_again_after_the_next_claim_is_still_known(bench):
    queue, (lease,) = await submit_and_claim(bench, "j1")
    outcome = Outcome(lease, "retry", failure=BOOM)
    first = await queue.settle([outcome])
    (second_lease,) = await bench.queue("w2").claim(1, wait_ms=1000)
    assert await queue.settle([outcome]) == first == [Retried(0)]
    assert second_lease.fence == 2
    assert (await bench.job("j1"))["status"] == "running"


@pytest.mark.clause("S-17")
async def test_a_different_outcome_for_a_settled_attempt_is_refused(bench):
    queue, (lease,) = await submit_and_claim(bench, "j1")
    await queue.settle([Outcome(lease, "complete", b'{"a":1}')])
    (answer,) = await queue.settle([Outcome(lease, "bury", failure=BOOM)])
    assert isinstance(answer, LeaseLost)
    assert "already settled" in answer.reason
    assert (await bench.job("j1"))["status"] == "done"


@pytest.mark.clause("S-18")
async def test_a_finished_job_delivered_again_is_only_acknowledged(bench):
    queue, (lease,) = await submit_and_claim(bench, "j1")
    await queue.settle([Outcome(lease, "complete")])
    await bench.outside.xadd(
        bench.key("jobs:stream"), {"job_id": "j1", "task": "chat", "payload": "{}"}
    )
    assert await queue.claim(1, wait_ms=0) == []
    assert await bench.outside.xlen(bench.key("jobs:stream")) == 0
    assert await bench.event_types("j1") == ["queued", "running", "done"]


@pytest.mark.clause("S-18")
async def test_the_same_job_enqueued_twice_by_a_foreign_gateway_runs_once(bench):
    queue = bench.queue()
    await queue.submit([new("j1")])
    await bench.outside.xadd(
        bench.key("jobs:stream"), {"job_id": "j1", "task": "chat", "payload": "{}"}
    )
    assert len(await queue.claim(10, wait_ms=0)) == 1
    assert await bench.pending() == 1


@pytest.mark.clause("S-19")
async def test_an_expired_job_is_counted_and_never_revived(bench):
    queue = bench.queue()
    await queue.submit([new("j1")])
    await bench.outside.delete(bench.key("job:j1"), bench.key("job:j1:events"))
    assert await queue.claim(1, wait_ms=0) == []
    assert await bench.outside.exists(bench.key("job:j1")) == 0
    assert (await bench.ledger().counts()).totals["expired"] == 1
    assert await bench.pending() == 0


@pytest.mark.clause("S-19", "S-22")
async def test_a_job_that_expires_while_it_runs_is_not_revived_by_its_outcome(bench):
    queue, (lease,) = await submit_and_claim(bench, "j1")
    await bench.outside.delete(bench.key("job:j1"), bench.key("job:j1:events"))
    (verdict,) = await queue.settle([Outcome(lease, "complete")])
    assert isinstance(verdict, LeaseLost)
    assert await bench.outside.exists(bench.key("job:j1"), bench.key("job:j1:events")) == 0


@pytest.mark.clause("S-20", "S-29")
async def test_a_retry_waits_until_it_is_due(bench):
    queue, (lease,) = await submit_and_claim(bench, "j1")
    (verdict,) = await queue.settle([Outcome(lease, "retry", failure=BOOM, delay_ms=150)])
    assert isinstance(verdict, Retried)
    assert (await bench.job("j1"))["status"] == "queued"
    assert await queue.claim(1, wait_ms=0) == []
    (again,) = await queue.claim(1, wait_ms=5000)
    assert (again.attempt, again.fence) == (2, 2)
    seconds, micros = await bench.outside.time()
    assert 0 <= seconds * 1000 + micros // 1000 - verdict.due_ms < 1000


@pytest.mark.clause("S-20")
async def test_a_job_that_names_its_attempts_is_retried_that_often(bench):
    queue = bench.queue(retry_delay_ms=1)
    await queue.submit([new("j1", max_attempts=3)])
    kinds = []
    for _ in range(3):
        (lease,) = await queue.claim(1, wait_ms=2000)
        kinds += [type(v) for v in await queue.settle([Outcome(lease, "fail", failure=BOOM)])]
    assert kinds == [Retried, Retried, Buried]


@pytest.mark.clause("S-20")
async def test_a_released_job_keeps_its_place_and_its_attempts(bench):
    queue, leases = await submit_and_claim(bench, "j1", "j2")
    await queue.submit([new("j3")])
    assert await queue.settle([Outcome(leases[0], "release")]) == [Released()]
    claimed = await bench.queue("w2").claim(10, wait_ms=1000)
    assert [(lease.job_id, lease.attempt) for lease in claimed] == [("j1", 1), ("j3", 1)]


@pytest.mark.clause("S-20")
async def test_a_released_job_wakes_a_worker_that_waits(bench):
    queue, (lease,) = await submit_and_claim(bench, "j1")
    waiting = asyncio.create_task(bench.queue("w2").claim(1, wait_ms=10_000))
    while not await blocked_clients(bench):
        await asyncio.sleep(0)
    await queue.settle([Outcome(lease, "release")])
    (again,) = await asyncio.wait_for(waiting, 2)
    assert again.job_id == "j1"


@pytest.mark.clause("S-21")
async def test_acknowledged_entries_are_deleted_from_the_stream(bench):
    queue, leases = await submit_and_claim(bench, "j1", "j2", "j3")
    await queue.settle([Outcome(lease, "complete") for lease in leases])
    assert await bench.outside.xlen(bench.key("jobs:stream")) == 0


@pytest.mark.clause("S-22")
async def test_a_stale_worker_is_told_and_changes_nothing(bench):
    slow, (stale,) = await submit_and_claim(bench, "j1", worker="slow", lease_ms=80)
    await bench_until_expired(bench, stale)
    (current,) = await bench.queue("w2", lease_ms=80).claim(1, wait_ms=2000)
    before = await bench.job("j1")
    assert before["status"] == "running"
    answers = [
        *(await slow.extend([stale])),
        *(await slow.report([Report(lease=stale, progress=b"9")])),
        *(await slow.settle([Outcome(stale, "complete", b'"late"')])),
    ]
    assert all(isinstance(answer, LeaseLost) for answer in answers)
    assert await bench.job("j1") == before
    assert current.fence == stale.fence + 1
    rejects = [e for e in await bench.journal().read() if e.type == "reject"]
    assert len(rejects) == 2, "the report and the outcome; an extend that fails changes no history"


@pytest.mark.clause("S-22")
async def test_a_foreign_worker_that_took_an_expired_entry_over_makes_ours_stale(bench):
    queue, (lease,) = await submit_and_claim(bench, "j1", lease_ms=60)
    await bench_until_expired(bench, lease)
    await bench.outside.xclaim(bench.key("jobs:stream"), "workers", "foreign", 0, [lease.handle])
    (verdict,) = await queue.settle([Outcome(lease, "complete")])
    assert isinstance(verdict, LeaseLost)
    assert "foreign" in verdict.reason
    assert (await bench.job("j1"))["status"] == "running"


@pytest.mark.clause("S-23")
async def test_a_job_that_runs_longer_than_its_lease_is_not_taken_away(bench):
    queue, (lease,) = await submit_and_claim(bench, "j1", lease_ms=200)
    rival = bench.queue("w2", lease_ms=200)
    loop = asyncio.get_running_loop()
    end = loop.time() + 0.9
    while loop.time() < end:
        (kept,) = await queue.extend([lease])
        assert not isinstance(kept, LeaseLost)
        await rival.upkeep()
        assert await rival.claim(1, wait_ms=20) == []
    (entry,) = await bench.outside.xpending_range(bench.key("jobs:stream"), "workers", "-", "+", 10)
    assert entry["times_delivered"] == 1, "keeping the lease is not a delivery"
    assert await queue.settle([Outcome(lease, "complete")]) == [Completed()]


@pytest.mark.clause("S-22", "S-12")
async def test_workers_with_different_leases_respect_each_other(bench):
    long_worker = bench.queue("long", lease_ms=5_000)
    await long_worker.submit([new("j1")])
    await long_worker.claim(1, wait_ms=0)
    hasty = bench.queue("hasty", lease_ms=50)
    assert await hasty.claim(1, wait_ms=300) == []
    await hasty.upkeep()
    assert (await bench.job("j1"))["status"] == "running"


async def test_a_handler_cannot_report_a_terminal_event(bench):
    queue, (lease,) = await submit_and_claim(bench, "j1")
    with pytest.raises(UsageError, match="cannot report 'done'"):
        await queue.report([Report(lease=lease, type="done")])


@pytest.mark.clause("S-5")
async def test_reports_are_events_with_four_fields(bench):
    queue, (lease,) = await submit_and_claim(bench, "j1")
    await queue.report([Report(lease=lease, type="token", step="llm", data=b'{"text":"a"}')])
    (*_, (_, fields)) = await bench.outside.xrange(bench.key("job:j1:events"))
    assert set(fields) == {"type", "ts", "step", "data"}
    assert (fields["type"], fields["step"], fields["data"]) == ("token", "llm", '{"text":"a"}')


async def test_a_cancelled_running_job_ends_as_cancelled_even_if_its_handler_fails(bench):
    queue, (lease,) = await submit_and_claim(bench, "j1")
    assert await bench.ledger().cancel(["j1"]) == ["requested"]
    (verdict,) = await queue.settle([Outcome(lease, "retry", failure=BOOM, delay_ms=10)])
    assert verdict == Cancelled()
    assert (await bench.job("j1"))["status"] == "canceled"


async def blocked_clients(bench) -> bool:
    clients = await bench.outside.client_list()
    return any(client["cmd"] == "xread" and "b" in client["flags"] for client in clients)


async def bench_until_expired(bench, lease) -> None:
    """Waits for the store's clock to pass the lease's end."""
    while True:
        seconds, micros = await bench.outside.time()
        if seconds * 1000 + micros // 1000 > lease.lease_until_ms:
            return
