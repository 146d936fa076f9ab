"""A record that cannot be read harms no other: it is set aside with the reason, and met no more."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tenure import Worker, task
from tenure.core.outcome import COMPLETED, Outcome
from tenure.worker.config import Settings
from tests.contract.bullmq.conftest import Bench
from tests.waiting import until

pytestmark = pytest.mark.clause("B-55")

TYPES: dict[str, Callable[[Any, str], Any]] = {
    "string": lambda raw, key: raw.set(key, "x" * 5_000),
    "list": lambda raw, key: raw.rpush(key, "a", "b"),
    "set": lambda raw, key: raw.sadd(key, "a"),
    "zset": lambda raw, key: raw.zadd(key, {"a": 1}),
    "stream": lambda raw, key: raw.xadd(key, {"a": "b"}),
    "hash": lambda raw, key: raw.hset(key, "a", "b"),
}


def overwrite(bench: Bench, name: str, kind: str) -> None:
    """What a hostile client does to a key of the queue."""
    bench.raw.delete(bench.key(name))
    TYPES[kind](bench.raw, bench.key(name))


def quarantine(bench: Bench) -> dict[str, str]:
    entries = bench.raw.xrange(bench.key("tenure:quarantine"))
    return {
        entry[b"id"].decode(errors="replace"): entry[b"reason"].decode() for _, entry in entries
    }


async def healthy(bench: Bench, count: int = 20) -> list[str]:
    return await bench.producer().add_bulk([("work", {}, {}) for _ in range(count)])


async def run(bench: Bench, ids: list[str], **options: Any) -> Any:
    """Claims and completes until all these jobs have ended, by the seam."""
    queue = bench.queue("w", lease_ms=1_000, stalled_ms=200, **options)

    async def all_done() -> None:
        while not all(bench.raw.zscore(bench.key("completed"), each) for each in ids):
            leases = await queue.claim(50, wait_ms=10)
            ends = [Outcome(lease, "complete", result=b"1") for lease in leases]
            assert all(verdict == COMPLETED for verdict in await queue.settle(ends))
            await queue.upkeep()

    await asyncio.wait_for(all_done(), 15)
    return queue


@pytest.mark.parametrize("kind", ["string", "list", "set", "zset", "stream"])
@pytest.mark.parametrize("line", ["wait", "prioritized", "delayed"])
async def test_a_job_key_of_another_type_is_quarantined_and_its_neighbours_run(
    bench: Bench, kind: str, line: str
) -> None:
    ids = await healthy(bench, 10)
    overwrite(bench, "bad", kind)
    if line == "wait":
        bench.raw.rpush(bench.key("wait"), "bad")
    else:
        bench.raw.zadd(bench.key(line), {"bad": 1})
    ids += await healthy(bench, 10)
    queue = await run(bench, ids)
    assert quarantine(bench) == {"bad": f"its key is a {kind}, not a hash"}
    assert [(each.job_id, each.reason) for each in queue.take_quarantined()] == [
        ("bad", f"its key is a {kind}, not a hash")
    ]
    assert queue.take_quarantined() == []
    assert all("bad" not in bench.ids(name) for name in ("wait", "active", "failed"))
    assert bench.raw.type(bench.key("bad")).decode() == kind, "its content stays where it is"


@pytest.mark.parametrize("value", ["abc", "", "-1", "1.5", "inf", "nan", "9" * 400, "0x10", "[["])
@pytest.mark.parametrize("field", ["ats", "atm", "stc"])
async def test_a_job_whose_counters_are_no_numbers_fails_with_the_reason_and_its_neighbours_run(
    bench: Bench, field: str, value: str
) -> None:
    bad, *ids = await healthy(bench, 21)
    bench.raw.hset(bench.key(bad), field, value)
    queue = await run(bench, ids)
    await until(lambda: bench.raw.zscore(bench.key("failed"), bad) is not None, "it failed")
    reason = bench.hash(bad)["failedReason"]
    assert reason.startswith(f"The record cannot be read: the field {field} holds '{value[:64]}'")
    assert [each.job_id for each in queue.take_quarantined()] == [bad]
    assert bench.raw.llen(bench.key("active")) == bench.raw.llen(bench.key("wait")) == 0


@pytest.mark.parametrize(
    "value",
    ["Infinity", "nan", "-1e999", "abc", "9" * 400, "a\tb\n", "[" * 5_000, b"\xff\x00"],
    ids=lambda value: repr(value)[:10],
)
@pytest.mark.parametrize("field", ["timestamp", "priority", "delay", "opts", "tn", "stacktrace"])
async def test_a_job_with_a_field_that_a_run_does_not_need_runs_all_the_same(
    bench: Bench, field: str, value: str
) -> None:
    ids = await healthy(bench, 3)
    bench.raw.hset(bench.key(ids[0]), field, value)
    bench.raw.hset(bench.key(ids[0]), "atm", "1")
    await run(bench, ids)
    await bench.ledger().get(ids[0])
    for event in await bench.journal().read(limit=2_000):
        assert event.ts_ms > 0


async def test_a_hash_without_a_name_and_an_id_that_is_no_text_are_quarantined(
    bench: Bench,
) -> None:
    ids = await healthy(bench, 3)
    bench.raw.hset(bench.key("nameless"), "data", "{}")
    odd = b"\xff\xfe"
    bench.raw.hset(bench.key("").encode() + odd, mapping={"name": "work", "data": "{}"})
    bench.raw.rpush(bench.key("wait"), "nameless", odd, "meta", "events", "removed")
    await run(bench, ids)
    assert quarantine(bench) == {
        "nameless": "its hash has no name",
        "meta": "its hash has no name",
        "events": "its key is a stream, not a hash",
        odd.decode(errors="replace"): "its id is not UTF-8",
    }
    assert bench.raw.type(bench.key("events")) == b"stream", "keys of the queue stay"


async def test_ids_of_any_text_run_and_keep_the_history_readable(bench: Bench) -> None:
    ids = ["tab\tand\nline", "h\u00e9llo \u4e16", "a:b:c", " "]
    for each in ids:
        bench.raw.hset(
            bench.key(each), mapping={"name": "work", "data": "{}", "opts": "{}", "timestamp": "1"}
        )
        bench.raw.lpush(bench.key("wait"), each)
    await run(bench, ids)
    told = [event.type for event in await bench.journal().read(limit=2_000)]
    assert sorted(told) == ["claim"] * 4 + ["complete"] * 4 + ["submit"] * 4


KEYS = {
    "wait": "list", "active": "list", "prioritized": "zset", "delayed": "zset", "paused": "list",
    "meta": "hash", "events": "stream", "marker": "zset", "stalled": "set", "limiter": "string",
    "pc": "string", "completed": "zset", "failed": "zset", "waiting-children": "zset",
    "id": "string", "tenure:journal": "stream", "tenure:ended": "zset",
    "tenure:workers": "hash", "tenure:quarantine": "stream", "stalled-check": "string",
    "repeat": "zset", "metrics:completed": "hash",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(KEYS))
async def test_a_key_of_the_queue_with_another_type_is_put_aside_and_the_queue_goes_on(
    bench: Bench, name: str
) -> None:
    before = await healthy(bench, 5)
    queue = bench.queue("w", lease_ms=1_000, stalled_ms=200, metrics_minutes=5)
    running = await queue.claim(5, wait_ms=0)
    overwrite(bench, name, "list" if KEYS[name] in ("string", "zset") else "zset")
    await queue.settle([Outcome(lease, "complete", result=b"1") for lease in running])
    ids = await healthy(bench, 5)
    ids.append(await bench.producer().add("work", {}, priority=3))
    ids.append(await bench.producer().add("work", {}, delay=5))
    await run(bench, ids, limit_max=1_000, limit_ms=1_000)
    await queue.upkeep()
    assert bench.raw.zcard(bench.key("completed")) in (len(before + ids), len(ids))
    assert bench.raw.type(bench.key(name)) in (KEYS[name].encode(), b"none")


@pytest.mark.parametrize("wrong", ["abc", str(2**63 - 1)])
async def test_a_counter_of_ids_that_is_no_number_is_begun_beyond_all_ids(
    bench: Bench, wrong: str
) -> None:
    (first,) = await healthy(bench, 1)
    bench.raw.set(bench.key("id"), wrong)
    (second,) = await healthy(bench, 1)
    assert int(second) > int(first)
    await run(bench, [first, second])


async def test_a_job_overwritten_while_it_runs_costs_its_own_result_alone(bench: Bench) -> None:
    bad, *ids = await healthy(bench, 10)
    queue = bench.queue("w", lease_ms=1_000)
    leases = await queue.claim(20, wait_ms=0)
    overwrite(bench, bad, "string")
    verdicts = await queue.settle([Outcome(lease, "complete", result=b"1") for lease in leases])
    assert verdicts[1:] == [COMPLETED] * 9
    assert "overwritten" in str(verdicts[0])
    assert sorted(bench.ids("completed")) == sorted(ids)
    await queue.upkeep()
    assert bench.ids("active") == []
    assert quarantine(bench) == {bad: "its key is a string, not a hash"}


@pytest.mark.parametrize("kind", ["string", "list"])
async def test_a_lock_that_no_worker_made_does_not_keep_a_job_active_for_ever(
    bench: Bench, kind: str
) -> None:
    (job,) = await healthy(bench, 1)
    await bench.queue("dies").claim(1, wait_ms=0)
    overwrite(bench, f"{job}:lock", kind)
    await run(bench, [job])


async def test_a_parent_that_cannot_be_read_does_not_keep_its_child_from_ending(
    bench: Bench,
) -> None:
    (parent,) = await healthy(bench, 1)
    bench.raw.hset(bench.key(parent), "x", "y")
    key = bench.key(parent)
    child = await bench.producer().add(
        "work", {}, parent={"id": parent, "queue": bench.key("")[:-1]}
    )
    ids = await healthy(bench, 3)
    overwrite(bench, f"{parent}:dependencies", "string")
    bench.raw.lrem(bench.key("wait"), 0, parent)
    await run(bench, [child, *ids])
    assert any(key in name for name in quarantine(bench))


async def test_a_worker_meets_bad_records_and_finishes_all_others(bench: Bench) -> None:
    @task("work")
    async def handler(job: Any) -> int:
        return 1

    ids = await healthy(bench, 50)
    for number, (kind, write) in enumerate(TYPES.items()):
        write(bench.raw, bench.key(f"bad{number}"))
        bench.raw.rpush(bench.key("wait"), f"bad{number}")
        bench.raw.hset(bench.key(ids[number]), "ats", kind)
    worker = Worker([handler], queues=[bench.url()], settings=Settings(concurrency=10))
    serving = asyncio.create_task(worker.serve())
    try:
        await until(lambda: bench.raw.zcard(bench.key("completed")) == 44, "the healthy ones ran")
        await until(lambda: bench.raw.zcard(bench.key("failed")) == 6, "the bad ones failed")
    finally:
        worker.stop()
        await asyncio.wait_for(serving, 15)
    assert set(quarantine(bench)) == {f"bad{number}" for number in range(6)}
    entry = bench.raw.xrange(bench.key("tenure:quarantine"))[0][1]
    assert len(entry[b"raw"]) <= 1_024
    assert json.loads(bench.hash(ids[0])["stacktrace"])


@pytest.mark.parametrize("score", ["-inf", "-5", "inf", "1e300"])
async def test_a_due_time_that_is_none_hides_no_other(bench: Bench, score: str) -> None:
    bench.raw.zadd(bench.key("delayed"), {"nothing": score, b"\xff": score})
    job = await bench.producer().add("work", {}, delay=60)
    queue = bench.queue()
    begun = asyncio.get_running_loop().time()
    (lease,) = await queue.claim(5, wait_ms=5_000)
    assert lease.job_id == job
    assert asyncio.get_running_loop().time() - begun < 2
    bench.raw.config_resetstat()
    assert await queue.claim(5, wait_ms=300) == []
    assert bench.raw.info("commandstats")["cmdstat_evalsha"]["calls"] < 10, "it waits"


async def test_an_add_beside_keys_of_other_types_stores_the_others_of_its_batch(
    bench: Bench,
) -> None:
    overwrite(bench, "taken", "list")
    overwrite(bench, "3", "string")
    overwrite(bench, "de:d1", "list")
    names = [{}, {"job_id": "taken"}, {}, {"deduplication": {"id": "d1"}}, {"delay": 20}]
    ids = await bench.producer().add_bulk([("work", {}, options) for options in names])
    assert ids == ["1", "taken", "3", "4", "5"]
    await run(bench, [job_id for job_id in ids if job_id != "taken"])
    assert await bench.ledger().remove(["taken"]) == ["missing"]
