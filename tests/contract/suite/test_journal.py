"""Journal: one event per change, each beginning where the last one ended."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from tenure.core.encoding import short_hash
from tenure.core.journal import EVENT_TYPES
from tenure.core.seam import NOW
from tests.contract.adapters import Stage
from tests.contract.conftest import history
from tests.contract.suite.acting import claim_one, job, run_out, settle, submit

pytestmark = pytest.mark.clause("M-22")

JournalOf = Callable[[str], Any]


@pytest.mark.leases_run_out
async def test_a_long_life_leaves_an_unbroken_chain(stage: Stage, journal_of: JournalOf) -> None:
    queue, other = stage.queue("w1"), stage.queue("w2")
    (job_id,) = await submit(queue, job(max_attempts=9))
    await settle(queue, await claim_one(queue), "retry")
    await settle(queue, await claim_one(queue), "snooze", delay_ms=10)
    await stage.advance(11)
    await settle(queue, await claim_one(queue), "release")
    await claim_one(queue)
    await run_out(stage)
    lease = await claim_one(other)
    await stage.advance(stage.lease_ms // 2)
    await other.extend([lease])
    await settle(other, lease, "bury")
    await stage.ledger.retry([job_id])
    await settle(other, await claim_one(other), "complete")

    events = [event for event in await journal_of(job_id) if event.ver]
    # Where a failed job rests in a state of its own, two steps make what is one elsewhere.
    assert [event.type for event in events if event.type not in ("fail", "promote")] == [
        *("submit", "claim", "retry", "claim", "snooze", "claim", "release", "claim", "reap"),
        *("claim", "extend", "bury", "reopen", "claim", "complete"),
    ]
    assert [event.ver for event in events] == list(range(1, len(events) + 1))
    for before, after in pairwise(events):
        assert after.from_state == before.to_state
        assert after.prev_fence == before.fence
        assert after.prev_lease_until_ms == before.lease_until_ms
        assert after.ts_ms >= before.ts_ms
    assert [event.fence for event in events if event.type == "claim"] == [1, 2, 3, 4, 5, 6]
    assert {event.type for event in events} <= set(EVENT_TYPES)


async def test_an_event_carries_hashes_and_no_content(stage: Stage, journal_of: JournalOf) -> None:
    queue = stage.queue("w1")
    secret = b'{"card":"4111-1111"}'
    (job_id,) = await submit(queue, job(payload=secret))
    lease = await claim_one(queue)
    await settle(queue, lease, "complete", result=b'{"pin":"2222-3333"}')
    events = await journal_of(job_id)
    assert events[0].payload_h == short_hash(secret)
    assert events[-1].result_h == short_hash(b'{"pin":"2222-3333"}')
    assert not any(word in repr(events) for word in ("4111-1111", "2222-3333"))
    assert all(event.contract and event.queue and event.task == "work" for event in events)


@pytest.mark.needs("token_in_journal")
async def test_writes_under_a_lease_carry_the_hash_of_its_token(
    stage: Stage, journal_of: JournalOf
) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job())
    lease = await claim_one(queue)
    await settle(queue, lease, "complete")
    submitted, claimed, completed = await journal_of(job_id)
    assert submitted.token_h == ""
    assert claimed.token_h == completed.token_h == short_hash(lease.token.encode())
    assert lease.token not in repr([claimed, completed])


async def test_the_journal_is_read_by_position_without_gap_or_repeat(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, *[job() for _ in range(7)])
    whole = await history(stage)
    assert len(whole) == 7
    paged = await stage.journal.read(limit=3)
    while more := await stage.journal.read(after=paged[-1].seq, limit=3):
        paged += more
    assert paged == whole


async def test_waiting_for_the_journal_ends_with_the_next_event(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, job())
    (last,) = await history(stage)
    assert await stage.journal.wait(after=last.seq, wait_ms=30) == []
    waiting = asyncio.create_task(stage.journal.wait(after=last.seq, wait_ms=10_000))
    await asyncio.sleep(0)
    (job_id,) = await submit(queue, job())
    (event,) = await asyncio.wait_for(waiting, 5)
    assert (event.job_id, event.type) == (job_id, "submit")


async def test_waiting_from_now_on_returns_later_events_only(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, job())
    assert await stage.journal.wait(after=NOW, wait_ms=30) == []
    waiting = asyncio.create_task(stage.journal.wait(after=NOW, wait_ms=10_000))
    later: set[str] = set()
    while not waiting.done():  # the first of these may come before the wait has begun
        later.update(await submit(queue, job()))
        await asyncio.wait([waiting], timeout=0.05)
    events = await waiting
    assert events
    assert {event.job_id for event in events} <= later


async def test_the_journal_can_be_read_from_a_time_on(stage: Stage) -> None:
    await submit(stage.queue("w1"), job())
    (event,) = await history(stage)
    since = stage.journal.since
    (found,) = await stage.journal.read(after=since(event.ts_ms))
    assert msgspec.structs.replace(found, seq=event.seq) == event
    assert await stage.journal.read(after=since(event.ts_ms + 60_000)) == []


async def test_a_refused_submit_leaves_no_trace(stage: Stage) -> None:
    queue = stage.queue("w1")
    new = job()
    await submit(queue, new)
    await queue.submit([new, job(new.job_id, payload=b"[]"), job(task="")])
    assert len(await history(stage)) == 1
