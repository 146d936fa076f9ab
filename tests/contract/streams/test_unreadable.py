"""S-35 to S-37: records that cannot be read are set aside, and nothing waits for them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tenure.core.job import NewJob
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Completed, Failure, Outcome
from tenure.core.seam import Query

ENTRY = {"task": "chat", "payload": "{}"}
HASH = {"status": "queued", "task": "chat", "payload": "{}", "ttl_s": "60"}
WRONG: dict[str, Any] = {
    "string": lambda r, key: r.set(key, "{}"),
    "list": lambda r, key: r.rpush(key, "a", "b"),
    "set": lambda r, key: r.sadd(key, "a"),
    "zset": lambda r, key: r.zadd(key, {"a": 1}),
    "hash": lambda r, key: r.hset(key, mapping={"a": "b"}),
    "stream": lambda r, key: r.xadd(key, {"a": "b"}),
}
MAX_ID = "18446744073709551615-18446744073709551615"


def new(job_id: str, **more: object) -> NewJob:
    return NewJob(task="chat", payload=b"{}", job_id=job_id, **more)  # type: ignore[arg-type]


async def put(bench, key: str, kind: str) -> None:
    await bench.outside.delete(bench.key(key))
    await WRONG[kind](bench.outside, bench.key(key))


async def foreign(bench, job_id: str, **fields: str) -> None:
    await bench.outside.hset(bench.key(f"job:{job_id}"), mapping=HASH | fields)
    await bench.outside.xadd(bench.key("jobs:stream"), {"job_id": job_id, **ENTRY})


async def quarantined(bench) -> list[dict[str, str]]:
    return [fields for _, fields in await bench.outside.xrange(bench.key("jobs:quarantine"))]


async def finish(queue, leases: list[Lease]) -> list[str]:
    verdicts = await queue.settle([Outcome(lease, "complete", b"1") for lease in leases])
    assert verdicts == [Completed()] * len(leases)
    return [lease.job_id for lease in leases]


@pytest.mark.clause("S-35")
@pytest.mark.parametrize("kind", ["string", "list", "set", "zset", "hash", "stream"])
async def test_a_job_that_is_no_job_is_set_aside_and_its_neighbours_run(bench, kind):
    queue = bench.queue()
    await queue.submit([new("before")])
    await put(bench, "job:bad", kind)
    await bench.outside.xadd(bench.key("jobs:stream"), {"job_id": "bad", **ENTRY})
    await queue.submit([new("after")])
    assert await finish(queue, await queue.claim(10, wait_ms=0)) == ["before", "after"]
    (record,) = queue.take_quarantined()
    assert record.job_id == "bad"
    assert "job:bad" in record.reason
    (kept,) = await quarantined(bench)
    assert (kept["job_id"], kept["reason"]) == (record.job_id, record.reason)
    assert kept["raw"]
    assert await bench.pending() == 0
    assert await bench.outside.xlen(bench.key("jobs:stream")) == 0
    assert (await bench.ledger().counts()).totals["quarantined"] == 1
    assert queue.take_quarantined() == []


@pytest.mark.clause("S-35")
@pytest.mark.parametrize(
    "fields",
    [
        {"status": "zombie"},
        {"status": "\x00\xff"},
        {"lease": "junk"},
        {"lease": "9" * 400 + " 1 1 1 1 1 w"},
        {"lease": "1 2 3"},
        {"entry": "junk"},
        {"entry": f"1-1 {'9' * 5000} -"},
    ],
)
async def test_a_hash_that_cannot_be_read_ends_in_error_with_the_reason(bench, fields):
    queue = bench.queue()
    await foreign(bench, "bad", **fields)
    await queue.submit([new("good")])
    assert await finish(queue, await queue.claim(10, wait_ms=0)) == ["good"]
    job = await bench.job("bad")
    assert job["status"] == "error"
    assert json.loads(job["error"])["code"] == "unreadable"
    assert (await bench.event_types("bad"))[-1] == "error"
    assert [record.job_id for record in queue.take_quarantined()] == ["bad"]
    assert await bench.ledger().retry(["bad"]) in (["unreadable"], ["ok"])
    assert await bench.ledger().remove(["bad"]) == ["ok"]


@pytest.mark.clause("S-35")
@pytest.mark.parametrize("value", ["1e999", "nan", "", "-1", "9" * 400, "\x00"])
@pytest.mark.parametrize("field", ["created_ts", "updated_ts", "ttl_s", "due_ms"])
async def test_a_foreign_number_that_is_none_does_not_keep_its_job_from_running(
    bench, field, value
):
    queue = bench.queue(lease_ms=100)
    await foreign(bench, "odd", **{field: value})
    (lease,) = await queue.claim(1, wait_ms=0)
    await queue.report([Report(lease=lease, progress=b"1")])
    assert await finish(queue, [lease]) == ["odd"]
    record = await bench.ledger().get("odd")
    assert record is not None
    assert record.state == "done"
    assert abs(record.created_ms) < 10**15


@pytest.mark.clause("S-35")
@pytest.mark.parametrize("kind", ["string", "list", "set", "zset", "hash"])
async def test_a_job_whose_event_stream_is_something_else_runs_with_a_new_one(bench, kind):
    queue = bench.queue()
    await queue.submit([new("hurt"), new("good")])
    await put(bench, "job:hurt:events", kind)
    hurt, good = await queue.claim(2, wait_ms=0)
    assert [record.job_id for record in queue.take_quarantined()] == ["hurt"], "claim"
    await put(bench, "job:hurt:events", kind)
    assert await queue.report([Report(lease=hurt, progress=b"1")]) == [None]
    assert [record.job_id for record in queue.take_quarantined()] == ["hurt"], "report"
    await put(bench, "job:hurt:events", kind)
    assert await finish(queue, [hurt, good]) == ["hurt", "good"]
    assert [record.job_id for record in queue.take_quarantined()] == ["hurt"], "settle"
    assert await bench.event_types("hurt") == ["done"]
    kept = bench.key("jobs:quarantine:job:hurt:events")
    assert 0 < await bench.outside.ttl(kept) <= 7 * 86_400


@pytest.mark.clause("S-35")
async def test_an_event_stream_whose_ids_are_used_up_is_replaced(bench):
    queue = bench.queue()
    await queue.submit([new("hurt")])
    await bench.outside.xadd(bench.key("job:hurt:events"), {"a": "b"}, id=MAX_ID)
    assert await finish(queue, await queue.claim(1, wait_ms=0)) == ["hurt"]
    assert await bench.event_types("hurt") == ["running", "done"]


@pytest.mark.clause("S-35")
@pytest.mark.parametrize(
    "fields",
    [
        {b"job_id": b"\xff\xfe", b"task": b"chat", b"payload": b"{}"},
        {b"job_id": b"\xed\xa0\x80", b"task": b"chat", b"payload": b"{}"},
        {b"task": b"chat", b"payload": b"{}"},
        {b"job_id": b"x" * 100_000, b"task": b"chat", b"payload": b"{}"},
        {b"job_id": b"good:events", b"task": b"chat", b"payload": b"{}"},
        {b"\xff": b"\x00"},
    ],
)
async def test_an_entry_without_a_usable_job_id_is_set_aside(bench, fields):
    queue = bench.queue()
    await bench.outside.xadd(bench.key("jobs:stream"), fields)
    await queue.submit([new("good")])
    leases = await queue.claim(10, wait_ms=0)
    assert await finish(queue, leases) == ["good"]
    assert len(queue.take_quarantined()) == 1 or fields.get(b"job_id") == b"good:events"
    assert await bench.event_types("good") == ["queued", "running", "done"]
    assert await bench.pending() == 0


@pytest.mark.clause("S-35")
async def test_a_task_and_a_payload_that_are_no_text_reach_the_worker(bench):
    queue = bench.queue()
    await bench.outside.hset(bench.key("job:odd"), mapping=HASH)
    await bench.outside.xadd(
        bench.key("jobs:stream"), {"job_id": "odd", "task": b"\xff\t\n", "payload": b"\xff\x00"}
    )
    (lease,) = await queue.claim(1, wait_ms=0)
    assert (lease.job_id, lease.payload) == ("odd", b"\xff\x00")
    assert await finish(queue, [lease]) == ["odd"]


@pytest.mark.clause("S-36")
@pytest.mark.parametrize("kind", ["string", "list", "set", "zset", "hash", "stream"])
@pytest.mark.parametrize(
    "name",
    ["stream", "journal", "delayed", "wake", "upkeep", "stats", "index", "workers", "paused"],
)
async def test_a_key_of_the_queue_that_is_something_else_is_moved_away(bench, name, kind):
    """Jobs are submitted, delayed, claimed, settled and listed all the same."""
    queue, ledger = bench.queue(lease_ms=300), bench.ledger()
    await queue.submit([new("before"), new("delayed", delay_ms=150)])
    await put(bench, f"jobs:{name}", kind)
    await ledger.counts()
    await queue.submit([new("after")])
    done: list[str] = []
    async with asyncio.timeout(5):
        while len(done) < 3:
            await queue.upkeep()
            done += await finish(queue, await queue.claim(10, wait_ms=50))
    assert sorted(done) == ["after", "before", "delayed"]
    assert await queue.claim(1, wait_ms=0) == await queue.claim(1, wait_ms=20) == []
    counts = await ledger.counts()
    assert counts.paused is False
    await ledger.workers()
    await ledger.find(Query())
    right = {"stream": "stream", "journal": "stream", "wake": "stream", "delayed": "zset",
             "index": "zset", "paused": "string"}.get(name, "hash")  # fmt: skip
    if kind != right or name == "paused":
        kept = await quarantined(bench)
        assert any(f"key jobs:{name}" in each["reason"] for each in kept)
        assert await bench.outside.exists(bench.key(f"jobs:quarantine:jobs:{name}"))
    await ledger.pause()
    await queue.submit([new("later")])
    assert await queue.claim(1, wait_ms=0) == []
    await ledger.resume()
    assert await finish(queue, await queue.claim(1, wait_ms=500)) == ["later"]


@pytest.mark.clause("S-36")
async def test_jobs_survive_the_loss_of_the_stream_while_they_wait_and_run(bench):
    queue = bench.queue(lease_ms=300)
    await queue.submit([new(f"j{n}") for n in range(20)])
    running = await queue.claim(5, wait_ms=0)
    await bench.outside.delete(bench.key("jobs:stream"))
    done = await finish(queue, running[:2])  # the other three die with their worker
    other = bench.queue("w2", lease_ms=300)
    async with asyncio.timeout(10):
        while len(done) < 20:
            await other.upkeep()
            done += await finish(other, await other.claim(20, wait_ms=50))
    assert sorted(done) == sorted(f"j{n}" for n in range(20))
    assert await bench.pending() == 0


@pytest.mark.clause("S-36")
async def test_a_stream_whose_ids_are_used_up_does_not_stop_the_queue(bench):
    queue = bench.queue(lease_ms=300)
    await queue.submit([new("before")])
    await bench.outside.xadd(bench.key("jobs:stream"), {"a": "b"}, id=MAX_ID)
    done = await finish(queue, await queue.claim(10, wait_ms=0))
    await queue.submit([new("after")])
    async with asyncio.timeout(5):
        while len(done) < 2:
            await queue.upkeep()
            done += await finish(queue, await queue.claim(10, wait_ms=50))
    assert sorted(done) == ["after", "before"]


@pytest.mark.clause("S-36")
@pytest.mark.parametrize("value", ["junk", "1e999", "9" * 30, "-5", ""])
async def test_numbers_of_the_queue_that_are_none_do_not_stop_it(bench, value):
    queue = bench.queue(lease_ms=100)
    await queue.submit([new("lost")])
    await queue.claim(1, wait_ms=0)
    for field in ("search_at", "tidy_at", "captured", "repair"):
        await bench.outside.hset(bench.key("jobs:upkeep"), field, value)
    for field in ("submitted", "started", "done", "lost"):
        await bench.outside.hset(bench.key("jobs:stats"), field, value)
    await bench.outside.hset(bench.key("jobs:workers"), "w2", value)
    await bench.outside.zadd(bench.key("jobs:delayed"), {"none": "-inf", "far": "+inf", "x": 1e300})
    await bench.outside.zadd(bench.key("jobs:index"), {b"\xff": "inf", "none": "-inf"})
    await bench.outside.xadd(bench.key("jobs:journal"), {"s": "x"})
    await bench.outside.xadd(bench.key("jobs:journal"), {"e": value})
    await queue.submit([new("good")])
    other = bench.queue("w2", lease_ms=100)
    done: list[str] = []
    async with asyncio.timeout(5):
        while len(done) < 2:
            await other.upkeep()
            done += await finish(other, await other.claim(10, wait_ms=50))
    assert sorted(done) == ["good", "lost"]
    ledger = bench.ledger()
    await ledger.counts()
    await ledger.workers()
    assert {job.job_id for job in (await ledger.find(Query())).jobs} == {"good", "lost"}
    kinds = [event.type for event in await bench.journal().read(limit=100_000)]
    assert kinds.count("complete") == 2


@pytest.mark.clause("S-37")
@pytest.mark.parametrize("kind", ["string", "list", "zset", "stream"])
async def test_the_ledger_shows_a_job_that_is_no_hash_as_an_error(bench, kind):
    queue, ledger = bench.queue(), bench.ledger()
    await queue.submit([new("bad"), new("good")])
    await put(bench, "job:bad", kind)
    record = await ledger.get("bad")
    assert record is not None
    assert record.state == "error"
    assert json.loads(record.error)["code"] == "unreadable"
    page = await ledger.find(Query())
    assert {job.job_id: job.state for job in page.jobs} == {"bad": "error", "good": "queued"}
    assert await ledger.cancel(["bad", "good"]) == ["unreadable", "ok"]
    assert await ledger.remove(["bad"]) == ["ok"]
    assert await ledger.get("bad") is None


async def repaired(bench, queue) -> None:
    """An upkeep that goes through hashes now, and not when the last round is a second old."""
    await bench.outside.hdel(bench.key("jobs:upkeep"), "repair_at")
    await queue.upkeep()


@pytest.mark.clause("S-36")
@pytest.mark.parametrize("msg_id", ["abc", "+", "1", "(1-1", f"{'9' * 30}-1", "1--1", "-1-1"])
async def test_an_entry_id_that_is_none_does_not_stop_upkeep(bench, msg_id):
    queue = bench.queue(lease_ms=300)
    await queue.submit([new("hurt"), new("lost"), new("later", delay_ms=200)])
    await bench.outside.hset(bench.key("job:hurt"), "entry", f"{msg_id} 1 -")
    await queue.claim(2, wait_ms=0)
    await bench.outside.hset(bench.key("job:hurt"), "entry", f"{msg_id} 1 -")
    other = bench.queue("w2", lease_ms=300)
    done: list[str] = []
    async with asyncio.timeout(10):
        while not {"lost", "later"} <= set(done):
            await repaired(bench, other)
            done += await finish(other, await other.claim(10, wait_ms=50))
    assert len(done) == len(set(done))


@pytest.mark.clause("S-36")
@pytest.mark.parametrize("score", ["inf", "1e300", "9e14"])
async def test_a_due_time_that_is_not_the_jobs_own_is_written_anew(bench, score):
    queue = bench.queue()
    await queue.submit([new("soon", delay_ms=200), new("later", delay_ms=900_000)])
    later_ms = float((await bench.job("later"))["due_ms"])
    delayed = bench.key("jobs:delayed")
    await bench.outside.zadd(delayed, {"soon": score, "later": score})
    taken: list[Lease] = []
    async with asyncio.timeout(10):
        while not taken or await bench.outside.zscore(delayed, "later") != later_ms:
            await repaired(bench, queue)
            taken += await queue.claim(10, wait_ms=20)
    assert await finish(queue, taken) == ["soon"]
    assert await bench.outside.zrange(delayed, 0, -1) == ["later"]


@pytest.mark.clause("S-36")
@pytest.mark.parametrize(
    "counted",
    [
        {"fail": "retry"},
        {"snooze": "snooze", "release": "release"},
        {"fail": "retry", "bury": "error", "snooze": "snooze", "release": "release"},
    ],
)
async def test_counters_that_were_overwritten_start_anew_with_all_that_a_step_counted(
    bench, counted
):
    queue = bench.queue()
    await queue.submit([new(kind, max_attempts=2) for kind in counted])
    leases = await queue.claim(len(counted), wait_ms=0)
    await put(bench, "jobs:stats", "string")
    failure = Failure(code="E", message="m")
    await queue.settle(
        [Outcome(lease, lease.job_id, delay_ms=10, failure=failure) for lease in leases]
    )
    expected = dict.fromkeys([*counted.values(), "quarantined"], "1")
    assert await bench.outside.hgetall(bench.key("jobs:stats")) == expected


@pytest.mark.clause("S-33")
async def test_removing_an_id_that_names_an_event_stream_leaves_the_stream(bench):
    queue, ledger = bench.queue(), bench.ledger()
    await queue.submit([new("live")])
    assert await ledger.remove(["live:events"]) == ["missing"]
    assert await bench.event_types("live") == ["queued"]
    assert await finish(queue, await queue.claim(1, wait_ms=0)) == ["live"]
    assert await ledger.remove(["live"]) == ["ok"]
    assert not await bench.outside.exists(bench.key("job:live:events"))
