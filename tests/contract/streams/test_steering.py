"""S-27 to S-33: pause, lost answers, delays, journal, cancel, retry, remove, listing."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tenure.core.encoding import short_hash
from tenure.core.errors import UsageError
from tenure.core.job import NewJob
from tenure.core.journal import JournalEvent
from tenure.core.outcome import Failure, Outcome
from tenure.core.seam import Query

BOOM = Failure(code="Boom", message="it broke")


def new(job_id: str = "", **more: object) -> NewJob:
    return NewJob(task="chat", payload=b"{}", job_id=job_id, **more)  # type: ignore[arg-type]


@pytest.mark.clause("S-27")
async def test_a_paused_queue_hands_out_nothing_and_wakes_on_resume(bench):
    queue, ledger = bench.queue(), bench.ledger()
    await queue.submit([new("j1"), new("j2")])
    (running,) = await queue.claim(1, wait_ms=0)
    await ledger.pause()
    assert await queue.claim(1, wait_ms=30) == []
    assert (await ledger.counts()).paused
    await queue.settle([Outcome(running, "complete")])  # what runs goes on
    waiting = asyncio.create_task(queue.claim(1, wait_ms=10_000))
    await asyncio.sleep(0)
    await ledger.resume()
    (lease,) = await asyncio.wait_for(waiting, 3)
    assert lease.job_id == "j2"


@pytest.mark.clause("S-28")
async def test_what_a_claim_took_when_its_answer_was_lost_comes_with_the_next(bench, monkeypatch):
    queue = bench.queue()
    await queue.submit([new("j1"), new("j2"), new("j3")])
    (held,) = await queue.claim(1, wait_ms=0)
    real = queue._redis.run

    async def run_and_lose(script, keys, args):  # type: ignore[no-untyped-def]
        await real(script, keys, args)
        raise ConnectionError("the answer was lost")

    monkeypatch.setattr(queue._redis, "run", run_and_lose)
    with pytest.raises(ConnectionError):
        await queue.claim(2, wait_ms=0)
    monkeypatch.undo()
    again = await queue.claim(10, wait_ms=0)
    assert [lease.job_id for lease in again] == ["j2", "j3"]
    assert [lease.fence for lease in again] == [2, 2]
    verdicts = await queue.settle([Outcome(lease, "complete") for lease in [held, *again]])
    assert {type(verdict).__name__ for verdict in verdicts} == {"Completed"}


@pytest.mark.clause("S-29")
async def test_a_delayed_job_starts_when_it_is_due_and_not_before(bench):
    queue = bench.queue()
    waiting = asyncio.create_task(queue.claim(1, wait_ms=10_000))
    await asyncio.sleep(0)
    await bench.queue("producer").submit([new("j1", delay_ms=200)])
    (lease,) = await waiting
    assert lease.lease_until_ms - lease.lease_ms - lease.created_ms >= 200
    assert lease.lease_until_ms - lease.lease_ms - lease.created_ms < 1_000


async def test_a_job_that_waits_for_longer_than_its_time_to_live_is_kept_until_it_has_run(bench):
    queue = bench.queue()
    await queue.submit(
        [new("j1", delay_ms=60_000, ttl_ms=1_000), new("j2", ttl_ms=1_000, max_attempts=2)]
    )
    (lease,) = await queue.claim(1, wait_ms=0)
    await queue.settle([Outcome(lease, "retry", failure=BOOM, delay_ms=60_000)])
    for job_id in ("j1", "j2"):
        for key in (f"job:{job_id}", f"job:{job_id}:events"):
            assert 60_000 < await bench.outside.pttl(bench.key(key)) <= 61_000, key


@pytest.mark.clause("S-30")
async def test_every_transition_is_in_the_journal_in_order(bench):
    queue = bench.queue()
    await queue.submit([new("j1", max_attempts=2)])
    (lease,) = await queue.claim(1, wait_ms=0)
    await queue.settle([Outcome(lease, "retry", failure=BOOM)])
    (lease,) = await queue.claim(1, wait_ms=1000)
    await queue.settle([Outcome(lease, "complete", b"1")])
    events = await bench.journal().read()
    assert [(e.type, e.ver, e.from_state, e.to_state, e.attempt) for e in events] == [
        ("submit", 1, "", "queued", 0),
        ("claim", 2, "queued", "running", 1),
        ("retry", 3, "running", "queued", 1),
        ("claim", 4, "queued", "running", 2),
        ("complete", 5, "running", "done", 2),
    ]
    assert events[2].error_code == "Boom"
    assert len(events[0].payload_h) == len(events[-1].result_h) == 16


@pytest.mark.clause("S-30")
async def test_the_journal_is_read_from_any_position_without_gap_or_repeat(bench):
    queue, journal = bench.queue(), bench.journal()
    for _ in range(4):
        await queue.submit([new() for _ in range(150)])
    whole = await journal.read(limit=100_000)
    assert len(whole) == 600
    for position in (0, 1, 99, 100, 149, 150, 599):
        rest: list[str] = []
        after = whole[position].seq
        while events := await journal.read(after=after, limit=10):
            rest += [event.seq for event in events]
            after = events[-1].seq
        assert rest == [event.seq for event in whole[position + 1 :]]


@pytest.mark.clause("S-30")
async def test_jobs_to_which_the_same_happened_have_each_their_own_history(bench):
    queue = bench.queue()
    tasks = ["chat"] * 100 + ["plan", "embed"] * 30 + ["chat"] * 200
    jobs = [NewJob(task=tasks[n], payload=b"{}", job_id=f"j{n}") for n in range(360)]
    await queue.submit(jobs)
    leases = await queue.claim(500, wait_ms=0)
    results = [b"1" if n % 4 else b'{"n":%d}' % n for n in range(len(leases))]
    ends = zip(leases, results, strict=True)
    await queue.settle([Outcome(lease, "complete", result=result) for lease, result in ends])
    told: dict[str, list[JournalEvent]] = {}
    events = await bench.journal().read(limit=100_000)
    for kind in ("claim", "complete"):  # noted in the order in which it happened
        noted = [event.job_id for event in events if event.type == kind]
        assert noted == [lease.job_id for lease in leases]
    for event in events:
        told.setdefault(event.job_id, []).append(event)
    for lease, result in zip(leases, results, strict=True):
        submit, claim, complete = told.pop(lease.job_id)
        assert [submit.ver, claim.ver, complete.ver] == [1, 2, 3]
        assert {submit.task, claim.task, complete.task} == {lease.task}
        assert (claim.type, claim.worker_id, claim.fence) == ("claim", queue.worker_id, 1)
        assert (complete.to_state, complete.result_h) == ("done", short_hash(result))
    assert not told


@pytest.mark.clause("S-30")
async def test_the_journal_is_trimmed_by_size(bench):
    queue = bench.queue(journal_bytes=10000)
    for _ in range(400):
        await queue.submit([new()])
    upkeep = await queue.upkeep()
    assert upkeep.trimmed > 0
    assert await bench.outside.xlen(bench.key("jobs:journal")) < 400


@pytest.mark.clause("S-31")
async def test_cancelling_a_waiting_job_ends_it_at_once(bench):
    queue, ledger = bench.queue(), bench.ledger()
    await queue.submit([new("j1"), new("j2", delay_ms=60_000)])
    assert await ledger.cancel(["j1", "j2", "nobody"]) == ["ok", "ok", "missing"]
    assert (await bench.job("j1"))["status"] == "canceled"
    assert await bench.event_types("j2") == ["queued", "canceled"]
    assert await bench.outside.xlen(bench.key("jobs:stream")) == 0
    assert await bench.outside.zcard(bench.key("jobs:delayed")) == 0
    assert await queue.claim(1, wait_ms=0) == []


@pytest.mark.clause("S-31")
async def test_cancelling_a_running_job_reaches_its_holder_and_the_first_end_wins(bench):
    queue, ledger = bench.queue(), bench.ledger()
    await queue.submit([new("j1"), new("j2")])
    leases = await queue.claim(2, wait_ms=0)
    assert await ledger.cancel(["j1", "j2"]) == ["requested", "requested"]
    extended = await queue.extend(leases)
    assert [lease.cancel_requested for lease in extended] == [True, True]
    await queue.settle([Outcome(leases[0], "cancel"), Outcome(leases[1], "complete")])
    assert (await bench.job("j1"))["status"] == "canceled"
    assert (await bench.job("j2"))["status"] == "done"
    assert await ledger.cancel(["j2"]) == ["done"]


@pytest.mark.clause("S-31")
async def test_a_cancelled_job_whose_worker_died_is_cancelled_and_not_run_again(bench):
    queue = bench.queue(lease_ms=60)
    await queue.submit([new("j1")])
    await queue.claim(1, wait_ms=0)
    await bench.ledger().cancel(["j1"])
    rival = bench.queue("w2", lease_ms=60)
    while (await bench.job("j1"))["status"] == "running":
        assert await rival.claim(1, wait_ms=30) == []
    assert (await bench.job("j1"))["status"] == "canceled"


@pytest.mark.clause("S-32")
async def test_a_finished_job_runs_again_with_its_attempts_counted_anew(bench):
    queue, ledger = bench.queue(), bench.ledger()
    await queue.submit([new("j1"), new("j2")])
    (lease,) = await queue.claim(1, wait_ms=0)
    await queue.settle([Outcome(lease, "bury", failure=BOOM)])
    assert await ledger.retry(["j1", "j2"]) == ["ok", "queued"]
    claimed = await queue.claim(10, wait_ms=0)
    assert [(lease.job_id, lease.attempt, lease.fence) for lease in claimed] == [
        ("j2", 1, 1),
        ("j1", 1, 2),
    ]
    assert (await bench.job("j1"))["error"] == ""


@pytest.mark.clause("S-33")
async def test_a_job_that_is_not_running_is_removed_with_all_its_keys(bench):
    queue, ledger = bench.queue(), bench.ledger()
    await queue.submit([new("j1"), new("j2"), new("j3", delay_ms=9_000)])
    await queue.claim(1, wait_ms=0)
    assert await ledger.remove(["j1", "j2", "j3"]) == ["running", "ok", "ok"]
    left = {key async for key in bench.outside.scan_iter(bench.key("job:*"))}
    assert left == {bench.key("job:j1"), bench.key("job:j1:events")}
    assert await bench.outside.zcard(bench.key("jobs:delayed")) == 0


async def test_jobs_are_listed_newest_first_page_by_page_and_by_state(bench):
    queue, ledger = bench.queue(), bench.ledger()
    for start in range(0, 450, 50):
        await queue.submit([new(f"j{start + n:03}") for n in range(50)])
    leases = await queue.claim(30, wait_ms=0)
    await queue.settle([Outcome(lease, "complete") for lease in leases])
    seen: list[str] = []
    after = ""
    while True:
        page = await ledger.find(Query(limit=70, after=after))
        seen += [job.job_id for job in page.jobs]
        after = page.after
        if not after:
            break
    assert sorted(seen) == [f"j{n:03}" for n in range(450)]
    created = [(await ledger.get(job_id)).created_ms for job_id in seen[::50]]
    assert created == sorted(created, reverse=True)
    done = await ledger.find(Query(states=("done",), limit=100))
    assert {job.job_id for job in done.jobs} == {f"j{n:03}" for n in range(30)}
    with pytest.raises(UsageError, match="no such state: finished"):
        await ledger.find(Query(states=("finished",)))


async def test_counts_say_what_waits_runs_and_ended(bench):
    queue, ledger = bench.queue(), bench.ledger()
    await queue.submit([new(), new(), new(), new(delay_ms=60_000)])
    leases = await queue.claim(2, wait_ms=0)
    await queue.settle([Outcome(leases[0], "complete")])
    await queue.upkeep()
    await bench.queue("idle").upkeep()
    counts = await ledger.counts()
    assert counts.states == {"queued": 2, "running": 1, "done": 1, "error": 0, "canceled": 0}
    assert counts.workers == 2, "one that works and one that only waits"


async def test_a_job_stored_by_a_foreign_gateway_runs_and_is_listed(bench):
    """The contract's own steps, command by command, as a gateway that knows only the text."""
    job = {
        "job_id": "f1", "task": "plan", "payload": '{"a":1}', "status": "queued",
        "created_ts": "1700000000000", "updated_ts": "1700000000000", "ttl_s": "60",
        "result": "", "error": "",
    }  # fmt: skip
    await bench.outside.hset(bench.key("job:f1"), mapping=job)
    await bench.outside.expire(bench.key("job:f1"), 60)
    queue = bench.queue()
    waiting = asyncio.create_task(queue.claim(1, wait_ms=10_000))
    await bench.outside.xadd(
        bench.key("jobs:stream"), {"job_id": "f1", "task": "plan", "payload": '{"a":1}'}
    )
    (lease,) = await asyncio.wait_for(waiting, 3)
    assert (lease.job_id, lease.task, lease.payload) == ("f1", "plan", b'{"a":1}')
    await queue.settle([Outcome(lease, "complete", b'{"ok":true}')])
    record = await bench.ledger().get("f1")
    assert (record.state, record.result) == ("done", b'{"ok":true}')
    assert await bench.outside.ttl(bench.key("job:f1")) == 60
    page = await bench.ledger().find(Query())
    assert [job.job_id for job in page.jobs] == ["f1"]


@pytest.mark.clause("S-19", "S-30", "S-35")
async def test_garbage_in_the_stream_is_set_aside_and_harms_no_neighbour(bench):
    stream = bench.key("jobs:stream")
    for fields in (
        {"hello": "world"},
        {"job_id": "no such job", "task": "a\tb\nc", "payload": "\x00"},
        {"job_id": "tab\there", "task": "chat", "payload": "{}"},
        {"job_id": "", "task": "", "payload": ""},
    ):
        await bench.outside.xadd(stream, fields)
    await bench.outside.hset(bench.key("job:tab\there"), mapping={"status": "queued"})
    queue = bench.queue()
    await queue.submit([new("good")])
    leases = await queue.claim(10, wait_ms=0)
    assert [lease.job_id for lease in leases] == ["good"]
    assert [record.job_id for record in queue.take_quarantined()] == ["", "tab?here", ""]
    await queue.settle([Outcome(lease, "complete") for lease in leases])
    events = await bench.journal().read()
    assert [event.type for event in events if event.job_id == "good"] == [
        "submit", "claim", "complete",
    ]  # fmt: skip
    assert [event.job_id for event in events if event.type == "expire"] == ["no such job"]
    assert await bench.outside.xlen(stream) == 0


async def test_a_page_goes_on_when_the_job_it_ended_at_was_removed(bench):
    queue, ledger = bench.queue(), bench.ledger()
    await queue.submit([new(f"j{n:03}") for n in range(450)])  # many within one millisecond
    first = await ledger.find(Query(limit=220))
    last = first.jobs[-1].job_id
    await ledger.remove([last])
    rest = await ledger.find(Query(limit=1000, after=first.after))
    seen = [job.job_id for job in [*first.jobs, *rest.jobs]]
    assert sorted(seen) == [f"j{n:03}" for n in range(450)]


@pytest.mark.parametrize("after", ["nonsense", "12", "x:y"])
async def test_a_cursor_that_is_none_is_refused(bench, after):
    with pytest.raises(UsageError, match="cursor"):
        await bench.ledger().find(Query(after=after))


async def test_a_cursor_does_not_tell_where_the_job_of_another_is(bench):
    queue, ledger = bench.queue(), bench.ledger()
    for requester, names in (("me", "ab"), ("other", "c"), ("me", "de")):
        await queue.submit(
            [msgspec.structs.replace(new(name), requester=requester) for name in names]
        )
        await asyncio.sleep(0.005)  # so that the cursor's millisecond is not the jobs'

    async def seen(job_id: str) -> list[str]:
        page = await ledger.find(Query(after=f"999999999999999:{job_id}"), requester="me")
        return [job.job_id for job in page.jobs]

    assert await seen("c") == await seen("missing") == ["e", "d", "b", "a"]
