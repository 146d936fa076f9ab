"""Many jobs in one step: the data they leave, and what the step says of those it did not create."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tenure.core.errors import Conflict, StoreError
from tenure.core.job import NewJob
from tenure.core.journal import JournalEvent
from tests.contract.omniq.conftest import Bench

# Runs of one shape, long and short, in groups and not, due and later.
MIXED: list[tuple[Any, dict[str, Any]]] = [
    *(({"n": n}, {}) for n in range(6)),
    *(([n], {"gid": f"g{n % 2}", "group_limit": 2}) for n in range(6)),
    ({"alone": True}, {"max_attempts": 9, "backoff_ms": 1}),
    *(({"n": n}, {"due_ms": 9_000, "gid": "late"}) for n in range(5)),
    ({"later": 1}, {"due_ms": 9_001}),
    *(({"n": n}, {"backoff": "exponential", "backoff_ms_max": 77}) for n in range(4)),
    *(({"long": "x" * 300, "n": n}, {"timeout_ms": 70}) for n in range(4)),
]


def jobs(*ids: str, **more: Any) -> list[NewJob]:
    return [NewJob(task="t", payload=b'{"id":"%s"}' % i.encode(), job_id=i, **more) for i in ids]


def numbered(count: int) -> list[str]:
    return [f"j{n}" for n in range(count)]


def anonymous(event: JournalEvent) -> JournalEvent:
    """The event but for its place and its queue, which also names the task where none was named."""
    return msgspec.structs.replace(event, seq="", event_id="", queue="", task="")


async def statuses(queue: Any, new: list[NewJob]) -> list[tuple[str, str]]:
    return [(each.job_id, each.status) for each in await queue.submit(new)]


@pytest.mark.clause("O-29", "O-13", "O-38")
async def test_jobs_published_at_once_leave_what_they_leave_one_by_one(bench: Bench) -> None:
    mixed = [(payload, given | {"job_id": f"j{n}"}) for n, (payload, given) in enumerate(MIXED)]
    others = bench.name + "-single"
    for payload, given in mixed:
        await bench.client.publish(others, payload, now_ms_override=1_000, **given)
    await bench.client.publish_many(bench.name, mixed, now_ms_override=1_000)

    def left(name: str) -> dict[str, Any]:
        base, found = f"{{{name}}}:", {}
        for key in bench.raw.scan_iter(f"{base}*", count=1000):
            short = key.decode()[len(base) :]
            read: Any = {
                b"hash": bench.raw.hgetall,
                b"list": lambda key: bench.raw.lrange(key, 0, -1),
                b"zset": lambda key: bench.raw.zrange(key, 0, -1, withscores=True),
                b"string": bench.raw.get,
            }.get(bench.raw.type(key))
            if read and not short.startswith("recent"):
                found[short] = read(key)
        return found

    assert left(bench.name) == left(others)
    assert "template" not in left(bench.name)
    told = await bench.history()
    assert [anonymous(each) for each in told] == [
        anonymous(each) for each in await replace(bench, name=others).history()
    ]
    assert bench.raw.xlen(bench.key("journal")) == 1


@pytest.mark.clause("O-39", "O-29")
async def test_every_job_of_a_step_has_a_line_of_its_own_in_the_history(bench: Bench) -> None:
    queue = bench.queue()
    await queue.submit(jobs(*numbered(5), gid="g", delay_ms=60_000))
    history = await bench.history()
    assert [(e.job_id, e.type, e.to_state, e.gid, e.task) for e in history] == [
        (job_id, "submit", "delayed", "g", "t") for job_id in numbered(5)
    ]
    (due_ms,) = {event.due_ms for event in history}
    assert bench.hash("j0")["due_ms"] == str(due_ms)


@pytest.mark.clause("O-28", "O-29")
async def test_a_step_says_of_each_job_what_became_of_it(bench: Bench) -> None:
    queue = bench.queue()
    await queue.submit(jobs("old"))
    changed = NewJob(task="t", payload=b"[]", job_id="old")
    bad = NewJob(task="t", payload=b"7", job_id="bad")
    batch = [*jobs("a", "b", "old"), changed, bad, *jobs("a", "c", "d")]
    assert await statuses(queue, batch) == [
        ("a", "created"),
        ("b", "created"),
        ("old", "replayed"),
        ("", "conflict"),
        ("", "invalid"),
        ("a", "replayed"),
        ("c", "created"),
        ("d", "created"),
    ]
    assert bench.ids("wait") == ["old", "a", "b", "c", "d"]
    assert bench.hash("old")["payload"] == '{"id":"old"}'


@pytest.mark.clause("O-28")
async def test_one_conflict_among_many_is_an_error_and_the_others_are_stored(bench: Bench) -> None:
    await bench.publish({"n": 0}, job_id="j3")
    with pytest.raises(Conflict, match="j3"):
        await bench.client.publish_many(bench.name, [([], {"job_id": i}) for i in numbered(6)])
    assert bench.hash("j3")["payload"] == '{"n":0}'
    assert bench.ids("wait") == ["j3", "j0", "j1", "j2", "j4", "j5"]


@pytest.mark.clause("O-29")
async def test_a_queue_that_fills_up_within_a_step_takes_what_it_may(bench: Bench) -> None:
    queue = bench.queue(max_depth=4)
    await queue.submit(jobs("j1"))
    told = await statuses(queue, jobs(*numbered(6)))
    assert [status for _, status in told] == ["created", "replayed", "created", "created"] + [
        "full"
    ] * 2
    assert bench.ids("wait") == ["j1", "j0", "j2", "j3"]


@pytest.mark.clause("O-29")
async def test_a_key_counts_once_within_a_step_and_after_it(bench: Bench) -> None:
    queue = bench.queue()
    keyed = [
        NewJob(task="t", payload=b"{}", idempotency_key=f"k{n % 4}", trace="00-1-2-01")
        for n in range(8)
    ]
    first = await queue.submit(keyed)
    assert [each.status for each in first] == ["created"] * 4 + ["replayed"] * 4
    assert [each.job_id for each in first[4:]] == [each.job_id for each in first[:4]]
    again = await queue.submit(keyed)
    assert {each.status for each in again} == {"replayed"}
    assert bench.hash(first[0].job_id)["trace"] == "00-1-2-01"
    assert bench.ids("wait") == [each.job_id for each in first[:4]]


@pytest.mark.clause("O-30", "O-29")
async def test_the_remains_of_a_job_are_no_job(bench: Bench) -> None:
    bench.raw.hset(bench.key("job:j1"), "progress", "0.5")
    assert {status for _, status in await statuses(bench.queue(), jobs(*numbered(5)))} == {
        "created"
    }
    assert bench.hash("j1")["payload"] == '{"id":"j1"}'
    assert bench.hash("j1")["state"] == "wait"


@pytest.mark.clause("O-28", "O-29")
async def test_many_jobs_whose_answer_was_lost_are_stored_once_even_if_they_ran(
    bench: Bench,
) -> None:
    queue, lose = await bench.lossy_queue(keep_completed=1)
    new = jobs(*numbered(60))
    lose()
    with pytest.raises(StoreError):
        await queue.submit(new)
    for job in await bench.client.reserve_many(bench.name, 60):
        await bench.client.ack_success(bench.name, job.job_id, job.lease_token)
    for job_id in numbered(60):
        bench.raw.delete(bench.key(f"job:{job_id}"))
    for list_of_them in ("completed", "idx:completed"):
        bench.raw.delete(bench.key(list_of_them))
    bench.raw.hset(bench.key("stats"), "completed_kept", "0")
    told = await statuses(queue, [*new, *jobs("new-1", "new-2")])
    assert [status for _, status in told] == ["replayed"] * 60 + ["created"] * 2
    assert bench.ids("wait") == ["new-1", "new-2"]


@pytest.mark.clause("O-28")
async def test_what_calls_under_way_leave_behind_is_bounded(bench: Bench) -> None:
    """The latest is there, whatever the number of calls that never were all answered."""
    queue = bench.queue()
    pages = [
        [NewJob(task="t", payload=b"{}", job_id=f"{'i' * 100}-{p}-{n}") for n in range(400)]
        for p in range(24)
    ]
    await asyncio.gather(*(queue.submit(page) for page in pages))
    (key,) = bench.raw.scan_iter(bench.key("recent:*"))
    assert 400_000 < bench.raw.strlen(key) < 1_100_000
    assert 0 < bench.raw.pttl(key) <= 600_000
    assert f"p\t{'i' * 100}-23-399\t".encode() in bench.raw.get(key)
