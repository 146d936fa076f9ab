"""What others write wrongly is set aside with its reason, and everything else goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis
import structlog

from tenure.contracts.omniq import JobContext, OmniqQueue
from tenure.core.lease import Lease
from tenure.core.outcome import COMPLETED, Outcome
from tenure.core.registry import open_journal
from tenure.core.seam import Query
from tests.contract.omniq.conftest import Bench
from tests.waiting import until

NEIGHBOURS = 20


def _hash(**fields: str | None) -> dict[str, str]:
    whole = {"payload": "{}", "state": "wait", "attempt": "0", "max_attempts": "3"}
    whole |= {"timeout_ms": "30000", "backoff_ms": "5000", "created_ms": "1"}
    return {name: value for name, value in (whole | fields).items() if value is not None}


Plant = Callable[[redis.Redis, bytes], Any]


def _fields(**fields: str | None) -> Plant:
    return lambda raw, key: raw.hset(key, mapping={"id": "bad", **_hash(**fields)})


RECORDS: dict[str, tuple[bytes, Plant]] = {
    "a text": (b"bad", lambda raw, key: raw.set(key, "x")),
    "a list": (b"bad", lambda raw, key: raw.rpush(key, "x")),
    "a stream": (b"bad", lambda raw, key: raw.xadd(key, {"x": "y"})),
    "created_ms": (b"bad", _fields(created_ms="[[")),
    "attempt": (b"bad", _fields(attempt="abc")),
    "max_attempts": (b"bad", _fields(max_attempts="nan")),
    "timeout_ms": (b"bad", _fields(timeout_ms="inf")),
    "a huge number": (b"bad", _fields(timeout_ms="9" * 400)),
    "no payload": (b"bad", _fields(payload=None)),
    "no state": (b"bad", _fields(state=None)),
    "no such state": (b"bad", _fields(state="\t\n{")),
    "id not UTF-8": (b"\xff\xfe", _fields()),
    "surrogate id": (b"a\xed\xa0\x80", _fields()),
    "empty id": (b"", _fields()),
    "huge id": (b"x" * 5_000, _fields()),
}


def _entries(bench: Bench) -> list[dict[bytes, bytes]]:
    return [fields for _, fields in bench.raw.xrange(bench.key("quarantine"))]


@pytest.mark.clause("O-52", "O-30")
@pytest.mark.parametrize("gid", ["", "g"])
@pytest.mark.parametrize("record", RECORDS)
async def test_a_record_that_cannot_be_read_is_set_aside_and_its_neighbours_run(
    bench: Bench, record: str, gid: str
) -> None:
    job_id, plant = RECORDS[record]
    key = bench.key("job:").encode() + job_id
    plant(bench.raw, key)
    lane = f"g:{gid}:wait" if gid else "wait"
    bench.raw.rpush(bench.key(lane), job_id)
    ids = await bench.publish(*[{}] * NEIGHBOURS, gid=gid, group_limit=50)
    queue = bench.queue()
    leases = await queue.claim(50, wait_ms=0)
    assert [lease.job_id for lease in leases] == ids
    (entry,) = _entries(bench)
    assert entry[b"id"] == job_id[: len(entry[b"id"])]
    assert entry[b"reason"]
    assert bench.raw.exists(entry[b"key"])
    assert not bench.raw.exists(key)
    (told,) = queue.take_quarantined()
    assert told.reason == entry[b"reason"].decode(errors="replace")
    assert queue.take_quarantined() == []
    assert (await bench.ledger().counts()).totals["quarantined"] == 1
    assert await queue.settle([Outcome(lease, "complete") for lease in leases]) == (
        [COMPLETED] * NEIGHBOURS
    )
    assert await queue.claim(50, wait_ms=0) == []
    await bench.client.repair(bench.name)  # the entry was counted by nobody


@pytest.mark.clause("O-52")
@pytest.mark.parametrize("lane", ["active", "delayed", "failed", "completed"])
async def test_a_bad_record_in_any_lane_leaves_the_others_as_they_are(
    bench: Bench, lane: str
) -> None:
    """Upkeep, trimming and steering meet it; none of them stops."""
    ids = await bench.publish(*[{}] * 5, backoff_ms=0)
    raw = bench.raw
    raw.set(bench.key("job:bad"), "x")
    raw.hset(bench.key("job:worse"), mapping={"state": "nowhere", "attempt": "[["})
    if lane in ("active", "delayed"):
        raw.zadd(bench.key(lane), {"bad": 1, "worse": 2})
    else:
        raw.lpush(bench.key(lane), "bad", "worse")
    queue, ledger = bench.queue(keep_completed=2), bench.ledger()
    await queue.upkeep()
    assert await ledger.remove(["bad", "worse"]) == ["missing", "missing"]
    assert await ledger.retry(["bad"]) == ["missing"]
    leases = await queue.claim(10, wait_ms=0)
    assert [lease.job_id for lease in leases] == ids
    await queue.settle([Outcome(lease, "complete") for lease in leases])
    assert not raw.exists(bench.key("job:bad"), bench.key("job:worse"))
    await bench.client.repair(bench.name)
    assert {"bad", "worse"}.isdisjoint(bench.ids(lane))


KEYS = (
    *("wait", "active", "delayed", "completed", "failed", "stats", "groups:ready", "g:g:wait"),
    *("g:g:inflight", "g:g:limit", "idx:wait", "idx:active", "idx:delayed", "idx:completed"),
    *("journal", "wake", "claims", "counters", "upkeep", "workers", "lane:rr", "lease:seq"),
    *("has_groups", "template", "events:held", "quarantine", "quarantine:new"),
)
TYPES: dict[str, Plant] = {
    "text": lambda raw, key: raw.set(key, "[["),
    "number": lambda raw, key: raw.set(key, "9" * 40),
    "list": lambda raw, key: raw.rpush(key, "[[", b"\xff"),
    "hash": lambda raw, key: raw.hset(key, mapping={"[[": "x", b"\xff": b"\xff", "recount": "x"}),
    "set": lambda raw, key: raw.sadd(key, "[[", b"\xff"),
    "zset": lambda raw, key: raw.zadd(key, {"[[": float("inf"), b"\xff": float("-inf")}),
    "stream": lambda raw, key: raw.xadd(key, {"x": "y"}, id=f"{2**64 - 1}-{2**64 - 1}"),
}
OWN_TYPE = {"active": "zset", "idx:active": "zset"}


@pytest.mark.clause("O-52", "O-53", "O-38")
@pytest.mark.parametrize("name", KEYS)
async def test_a_key_of_a_wrong_type_stops_nothing_and_loses_no_job(
    bench: Bench, name: str
) -> None:
    queue = bench.queue(max_depth=1_000_000, timeout_ms=60_000)
    for kind, plant in TYPES.items():
        if OWN_TYPE.get(name) == kind:
            continue  # that takes the leases away, which is not a wrong type
        await _one_round(bench, queue, lambda plant=plant: _replace(bench, name, plant))
    assert not bench.ids("active")


def _replace(bench: Bench, name: str, plant: Plant) -> None:
    key = bench.key(name).encode()
    bench.raw.delete(key)
    plant(bench.raw, key)


async def _one_round(bench: Bench, queue: OmniqQueue, damage: Callable[[], Any]) -> None:
    """Jobs wait, are delayed and leased while the damage is done; each ends once."""
    held = await bench.publish({"held": 1}, timeout_ms=60_000)
    held_leases = await queue.claim(1, wait_ms=0)
    assert [lease.job_id for lease in held_leases] == held
    ids = await bench.publish({}, {})
    ids += await bench.publish({}, {}, gid="g", group_limit=1)
    ids += await bench.publish({}, due_ms=1_000, now_ms_override=900)
    ids += await bench.publish({}, gid="g", due_ms=1_000, now_ms_override=900)
    damage()
    assert await queue.extend(held_leases)
    assert await queue.settle([Outcome(lease, "complete") for lease in held_leases]) == [COMPLETED]
    ended: list[str] = []

    async def ended_all() -> bool:
        leases = await queue.claim(10, wait_ms=0)
        await queue.settle([Outcome(lease, "complete") for lease in leases])
        ended.extend(lease.job_id for lease in leases)
        await queue.upkeep()
        bench.raw.hdel(bench.key("upkeep"), "tidy_at", "mended_at")
        return len(ended) >= len(ids)

    async with asyncio.timeout(20):
        while not await ended_all():
            await asyncio.sleep(0)
    await bench.client.repair(bench.name)
    assert sorted(ended) == sorted(ids)
    ledger = bench.ledger()
    await ledger.counts()
    await ledger.find(Query())
    await bench.client.monitor.overview(bench.name)


@pytest.mark.clause("O-53")
async def test_jobs_that_no_lane_has_are_put_back_by_repair(bench: Bench) -> None:
    ids = await bench.publish(*[{}] * 30)
    grouped = await bench.publish(*[{}] * 5, gid="g")
    (later,) = await bench.publish({}, due_ms=9_000_000_000_000)
    lanes = ("wait", "g:g:wait", "delayed", "groups:ready", "idx:wait", "idx:delayed", "stats")
    bench.raw.delete(*[bench.key(name) for name in lanes])
    assert await bench.client.repair(bench.name) > 0
    assert bench.ids("wait") == ids
    assert bench.ids("g:g:wait") == grouped
    assert bench.raw.zscore(bench.key("delayed"), later) == 9_000_000_000_000
    assert await bench.client.repair(bench.name) == 0


@pytest.mark.clause("O-53")
async def test_upkeep_puts_back_what_an_interrupted_claim_left_in_no_lane(bench: Bench) -> None:
    """The lane is empty, the mirror table and the hashes say that the jobs wait."""
    ids = await bench.publish(*[{}] * NEIGHBOURS)
    bench.raw.delete(bench.key("wait"))
    queue = bench.queue()
    await queue.upkeep()
    assert [lease.job_id for lease in await queue.claim(50, wait_ms=0)] == ids


@pytest.mark.clause("O-52", "O-32")
async def test_a_lease_holds_though_its_table_and_the_mirror_were_overwritten(
    bench: Bench,
) -> None:
    await bench.publish({}, {}, gid="g", group_limit=2)
    queue = bench.queue()
    held, other = await queue.claim(2, wait_ms=0)
    for name in ("active", "idx:active"):
        _replace(bench, name, TYPES["text"])
    assert isinstance((await queue.extend([held]))[0], Lease)
    verdicts = await queue.settle([Outcome(held, "complete"), Outcome(other, "complete")])
    assert verdicts == [COMPLETED, COMPLETED]
    await bench.client.repair(bench.name)


@pytest.mark.clause("O-53")
async def test_a_lease_that_lost_its_entry_still_runs_out(bench: Bench) -> None:
    await bench.publish({}, job_id="j", timeout_ms=50, backoff_ms=0)
    queue = bench.queue()
    await queue.claim(1, wait_ms=0)
    bench.raw.delete(bench.key("active"), bench.key("idx:active"))
    await bench.client.repair(bench.name)

    async def taken() -> bool:
        return [lease.job_id for lease in await queue.claim(1, wait_ms=20)] == ["j"]

    async with asyncio.timeout(20):
        while not await taken():
            pass


@pytest.mark.clause("O-52")
@pytest.mark.parametrize("lane", ["active", "delayed"])
async def test_an_endless_time_is_taken_back_to_what_the_job_says(bench: Bench, lane: str) -> None:
    await bench.publish({}, job_id="j", due_ms=1_000 if lane == "delayed" else 0, timeout_ms=50,
                        backoff_ms=0, now_ms_override=900)  # fmt: skip
    if lane == "active":
        await bench.reserve(1_000)
    bench.raw.zadd(bench.key(lane), {"j": float("inf")})
    queue = bench.queue()
    await queue.upkeep()
    (lease,) = await queue.claim(1, wait_ms=0)
    assert lease.job_id == "j"


@pytest.mark.clause("O-52")
async def test_a_count_that_no_lease_explains_does_not_keep_a_group_waiting(bench: Bench) -> None:
    await bench.publish({}, job_id="first", gid="g")
    job = await bench.reserve()
    await bench.publish({}, job_id="second", gid="g")
    bench.raw.set(bench.key("g:g:inflight"), "1000")
    await bench.client.ack_success(bench.name, "first", job.lease_token)
    queue = bench.queue()
    await queue.upkeep()
    assert [lease.job_id for lease in await queue.claim(1, wait_ms=0)] == ["second"]


@pytest.mark.clause("O-30", "O-34")
async def test_a_job_in_another_groups_lane_runs_from_its_own(bench: Bench) -> None:
    ids = await bench.publish({}, {}, gid="g")
    ids += await bench.publish({})
    bench.raw.lpush(bench.key("g:g:wait"), ids[2])
    bench.raw.lpush(bench.key("wait"), ids[0])
    await bench.client.repair(bench.name)
    assert sorted(await bench.run_all(3)) == sorted(ids)
    assert not bench.raw.exists(bench.key("g:g:inflight"))
    await bench.client.repair(bench.name)


@pytest.mark.clause("O-52")
async def test_one_claim_passes_over_a_bounded_number_of_entries_that_are_no_jobs(
    bench: Bench,
) -> None:
    bench.raw.rpush(bench.key("wait"), *[f"junk-{n}" for n in range(3_000)])
    bench.raw.rpush(bench.key("g:g:wait"), *[f"junk-{n}" for n in range(3_000)])
    bench.raw.zadd(bench.key("groups:ready"), {"g": 1})
    plain, grouped = *await bench.publish({}), *await bench.publish({}, gid="g")
    queue = bench.queue()
    found: list[str] = []
    for _ in range(12):
        before = bench.raw.llen(bench.key("wait")) + bench.raw.llen(bench.key("g:g:wait"))
        found += [lease.job_id for lease in await queue.claim(10, wait_ms=0)]
        after = bench.raw.llen(bench.key("wait")) + bench.raw.llen(bench.key("g:g:wait"))
        assert before - after <= 1_100
    assert sorted(found) == sorted([plain, grouped])
    await bench.client.repair(bench.name)


@pytest.mark.clause("O-52")
async def test_a_consumer_logs_what_was_set_aside_once(bench: Bench) -> None:
    bench.raw.set(bench.key("job:bad"), "x")
    bench.raw.rpush(bench.key("wait"), "bad")
    ids = await bench.publish({}, {})
    done: list[str] = []
    stop = asyncio.Event()

    async def handler(ctx: JobContext) -> None:
        done.append(ctx.job_id)

    def lines() -> list[Any]:
        return [line for line in logged if line["event"] == "record_quarantined"]

    with structlog.testing.capture_logs() as logged:
        consuming = asyncio.create_task(
            bench.client.consume(bench.name, handler, stop=stop, signals=False)
        )
        await until(lambda: len(done) == 2 and bool(lines()), within_s=20)
        stop.set()
        await consuming
    assert sorted(done) == sorted(ids)
    (line,) = lines()
    assert (line["queue"], line["job_id"], line["log_level"]) == (bench.name, "bad", "warning")
    assert "string" in line["reason"]


@pytest.mark.clause("O-39", "O-52")
async def test_readers_of_the_journal_pass_over_what_is_no_line(bench: Bench) -> None:
    await bench.publish({}, job_id="a")
    for foreign in ({"x": "y"}, {"e": ""}, {"s": "z"}, {"s": "z", "y": "w"}, {b"\xff": b"\xff\t"}):
        bench.raw.xadd(bench.key("journal"), foreign)
    bench.raw.xadd(bench.key("journal"), {"e": "b\tsubmit\t" + "9" * 5_000 + "\t1\t"})
    await bench.publish({}, job_id="c")
    events = await bench.history()
    assert [event.job_id for event in events if event.type == "submit"] == ["a", "b", "c"]
    assert {event.ver for event in events if event.job_id == "b"} == {0}
    for _ in range(300):  # more than one page of them
        bench.raw.xadd(bench.key("journal"), {"x": "y"})
    await bench.publish({}, job_id="d")
    journal = open_journal(bench.url())
    last = events[-1].seq
    assert [event.job_id for event in await journal.read(after=last)] == ["d"]
    assert [event.job_id for event in await journal.wait(after=last, wait_ms=5_000)] == ["d"]
    await journal.close()


@pytest.mark.clause("O-52")
async def test_an_idempotency_key_that_was_overwritten_is_a_new_one(bench: Bench) -> None:
    from tenure.core.job import NewJob

    queue = bench.queue()
    job = NewJob(task="t", payload=b"{}", idempotency_key="k")
    (first,) = await queue.submit([job])
    (key,) = [key for key in bench.all_keys() if ":idem:" in key]
    for plant in TYPES.values():
        _replace(bench, key.removeprefix(bench.key("")), plant)
        (again,) = await queue.submit([job])
        assert again.status == "created"
    assert first.status == "created"


@pytest.mark.clause("O-53")
async def test_no_script_reads_a_whole_lane_to_put_a_job_back(bench: Bench) -> None:
    """A script that reads a long lane stops the server for all; there is one for every 500 jobs."""
    ids = await bench.publish(*[{}] * 600)
    bench.raw.ltrim(bench.key("wait"), 20, -1)
    with bench.raw.monitor() as monitor:
        assert await bench.client.repair(bench.name) > 0
        bench.raw.echo("repaired")
        read: list[str] = []
        for seen in monitor.listen():
            words = seen["command"].split()
            if words[0] == "ECHO":
                break
            if words[0] == "LRANGE" and seen["client_type"] == "lua":
                read.append(seen["command"])
    assert read == []
    assert sorted(bench.ids("wait")) == sorted(ids)


@pytest.mark.clause("O-53")
async def test_a_repair_while_jobs_move_leaves_each_in_its_lane_once(bench: Bench) -> None:
    queue = bench.queue()
    for _ in range(6):
        await bench.publish(*[{}] * 500)
    stop = asyncio.Event()

    async def work() -> None:
        while not stop.is_set():
            leases = await queue.claim(100, wait_ms=0)
            await queue.settle([Outcome(lease, "release") for lease in leases[:50]])
            await queue.settle([Outcome(lease, "complete") for lease in leases[50:]])

    working = asyncio.create_task(work())
    for _ in range(3):
        await bench.client.repair(bench.name)
    stop.set()
    await working
    standing = [job_id for lane in ("wait", "completed", "failed") for job_id in bench.ids(lane)]
    assert len(standing) == len(set(standing))


@pytest.mark.clause("O-53")
async def test_a_repair_that_is_sent_twice_puts_a_job_back_once(bench: Bench) -> None:
    ids = await bench.publish(*[{}] * 3)
    bench.raw.delete(bench.key("wait"))
    await asyncio.gather(*[bench.another().repair(bench.name) for _ in range(4)])
    assert sorted(bench.ids("wait")) == sorted(ids)
