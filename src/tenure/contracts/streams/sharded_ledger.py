"""The ledger and the journal of a queue with shards: one queue for everyone who reads it.

A cursor of the listing or of the journal holds a cursor for each shard.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import heapq
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from tenure.contracts.streams.ledger import StreamsJournal, StreamsLedger
from tenure.contracts.streams.options import CONTRACT, Options, keys
from tenure.contracts.streams.shards import (
    ShardCheck,
    ShardedRecords,
    gather_all,
    shard_of,
    shard_options,
    spread,
)
from tenure.core.errors import UsageError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.journal import JournalEvent
from tenure.core.seam import (
    NOW,
    PAGE_BYTES,
    Counts,
    LedgerFeatures,
    Page,
    Query,
    WorkerBeat,
    weight,
)
from tenure.plans.schedule import StoredSchedules
from tenure.store.redis import Redis
from tenure.store.redis_queue import number, read_all

T = TypeVar("T")

_END = "-"  # in a cursor of the listing: this shard has no more jobs
_SEPARATOR = "_"
_POSITION = re.compile(r"(?:[0-9]{1,20}(?:-[0-9]{1,20}(?:\.[0-9]{1,4})?)?)?")
# At the same millisecond a resume comes first and a pause last: each shard has its own, and what
# the other shards did in between came after the first and before the last of them.
_RANK = {"resume": 0, "pause": 2}


class ShardedLedger:
    """The ledger of a queue with shards, for one event loop."""

    def __init__(self, redis: Redis, options: Options) -> None:
        each = shard_options(options)
        self._redis = redis
        self._indexes = [keys(shard.namespace)[6] for shard in each]
        self._shards = [StreamsLedger(redis, shard) for shard in each]
        self._check_shards = ShardCheck(redis, options)
        records = ShardedRecords(redis, [shard.namespace for shard in each])
        self._schedules = StoredSchedules(records)

    @property
    def features(self) -> LedgerFeatures:
        """What it has beyond the seam."""
        return LedgerFeatures(
            unfinished=self.unfinished,
            changes=self.changes,
            waiter=self,
            schedules=self._schedules,
        )

    async def _all(self, call: Callable[[StreamsLedger], Awaitable[T]]) -> list[T]:
        """The answers of all shards."""
        await self._check_shards()
        return await gather_all(call(shard) for shard in self._shards)

    def _of(self, job_id: str) -> StreamsLedger:
        return self._shards[shard_of(job_id, len(self._shards))]

    # One job.

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None if it does not exist or has expired."""
        await self._check_shards()
        return await self._of(job_id).get(job_id)

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """The entries of the job's event stream after the id `after`."""
        await self._check_shards()
        return await self._of(job_id).events(job_id, after=after, limit=limit)

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Send finished jobs back; per id "ok", "missing", or why not."""
        return await self._act(job_ids, StreamsLedger.retry)

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok" (it was waiting), "requested" (its worker will stop it), or why not."""
        return await self._act(job_ids, StreamsLedger.cancel)

    async def remove(self, job_ids: Sequence[str]) -> list[str]:
        """Delete jobs that are not running; per id "ok", "missing", or why not."""
        return await self._act(job_ids, StreamsLedger.remove)

    async def _act(
        self,
        job_ids: Sequence[str],
        action: Callable[[StreamsLedger, Sequence[str]], Awaitable[list[str]]],
    ) -> list[str]:
        await self._check_shards()

        async def send(shard: int, part: Sequence[str]) -> list[str]:
            return await action(self._shards[shard], part)

        return await spread(job_ids, str, len(self._shards), send)

    # All jobs.

    async def find(self, query: Query, *, requester: str | None = None) -> Page:
        """Jobs by creation time, newest first; only those of `requester` if one is given.

        Each shard is asked for a whole page. If one of them did not search to its end, older jobs
        of the others wait for a later page.
        """
        after = self._cursors(query.after)
        asked = [shard for shard, cursor in enumerate(after) if cursor != _END]
        await self._check_shards()
        found = await gather_all(
            self._shards[shard].find(
                msgspec.structs.replace(query, after=after[shard]), requester=requester
            )
            for shard in asked
        )
        pages = dict(zip(asked, found, strict=True))
        ends = (int(page.after.partition(":")[0]) for page in found if page.after)
        jobs, taken = _newest(pages, query.limit, oldest_ms=max(ends, default=0))
        nexts = await self._next_cursors(after, pages, taken)
        is_over = all(cursor == _END for cursor in nexts)
        return Page(jobs, "" if is_over else _packed(nexts))

    async def _next_cursors(
        self, after: Sequence[str], pages: Mapping[int, Page], taken: Mapping[int, int]
    ) -> list[str]:
        """Where each shard goes on: after its last job that was taken."""
        nexts = list(after)
        cut: dict[int, str] = {}
        for shard, page in pages.items():
            if taken[shard] == len(page.jobs):
                nexts[shard] = page.after or _END
            elif taken[shard]:
                cut[shard] = page.jobs[taken[shard] - 1].job_id
        scores = await read_all(
            self._redis, [("ZSCORE", self._indexes[shard], job_id) for shard, job_id in cut.items()]
        )
        for (shard, job_id), score in zip(cut.items(), scores, strict=True):
            job = pages[shard].jobs[taken[shard] - 1]
            nexts[shard] = f"{number(score) or job.created_ms}:{job_id}"
        return nexts

    def _cursors(self, after: str) -> list[str]:
        """The cursor of each shard; raises `UsageError` for one that no page contained."""
        if not after:
            return [""] * len(self._shards)
        try:
            cursors = msgspec.json.decode(
                base64.b64decode(after + "=" * (-len(after) % 4), altchars=b"-_", validate=True),
                type=list[str],
            )
        except (binascii.Error, ValueError):
            cursors = []
        if len(cursors) != len(self._shards):
            raise UsageError(
                f"{after[:80]!r} is not a cursor; pass the `after` of the page before",
                contract=CONTRACT,
            )
        return cursors

    async def counts(self) -> Counts:
        """Jobs by state now, and totals since the queue was created, over all shards.

        It is paused if all shards are. Each worker is counted once.
        """
        parts = await self._all(StreamsLedger.counts)
        return Counts(
            states=_summed(part.states for part in parts),
            totals=_summed(part.totals for part in parts),
            paused=all(part.paused for part in parts),
            workers=len(await self.workers()),
            oldest_waiting_ms=max(part.oldest_waiting_ms for part in parts),
        )

    async def workers(self) -> list[WorkerBeat]:
        """Our workers that called any shard lately."""
        newest: dict[str, WorkerBeat] = {}
        for beats in await self._all(StreamsLedger.workers):
            for beat in beats:
                known = newest.get(beat.worker_id, beat)
                newest[beat.worker_id] = WorkerBeat(
                    beat.worker_id,
                    max(beat.last_ms, known.last_ms),
                    max(beat.slots, known.slots),
                )
        return list(newest.values())

    async def unfinished(self, requester: str, most: int) -> int:
        """How many jobs of a requester have not ended; of all requesters if fewer than `most`."""
        return sum(await self._all(lambda shard: shard.unfinished(requester, most)))

    async def pause(self) -> None:
        """Hand out no more leases."""
        await self._all(StreamsLedger.pause)

    async def resume(self) -> None:
        """Hand out leases again."""
        await self._all(StreamsLedger.resume)

    async def probe(self) -> None:
        """Raise `StoreError` if a node accepts no writes."""
        await self._all(StreamsLedger.probe)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    # The events of many jobs.

    async def changes(self, cursors: Mapping[str, str]) -> dict[str, list[JobEvent]]:
        """New events of many jobs, each after its cursor; never blocks."""
        parts = self._by_shard(cursors)
        return _united(
            await gather_all(self._shards[shard].changes(part) for shard, part in parts.items())
        )

    async def wait_changes(
        self, cursors: Mapping[str, str], *, wait_ms: int
    ) -> dict[str, list[JobEvent]]:
        """Like `changes`, but waits for the first event, or until `interrupt`."""
        parts = self._by_shard(cursors) or {0: {}}
        waits = [
            asyncio.create_task(self._shards[shard].wait_changes(part, wait_ms=wait_ms))
            for shard, part in parts.items()
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            others = [
                self._shards[shard].interrupt()
                for shard, wait in zip(parts, waits, strict=True)
                if not wait.done()
            ]
            await gather_all(others)
            return _united(await gather_all(waits))
        finally:
            for wait in waits:
                wait.cancel()

    async def interrupt(self) -> None:
        """End the wait of `wait_changes`, in whichever shard it waits."""
        await gather_all(shard.interrupt() for shard in self._shards)

    async def has_foreign_workers(self) -> bool:
        """Whether workers that write no journal take jobs from a shard."""
        return any(await self._all(StreamsLedger.has_foreign_workers))

    def _by_shard(self, cursors: Mapping[str, str]) -> dict[int, dict[str, str]]:
        parts: dict[int, dict[str, str]] = {}
        for job_id, cursor in cursors.items():
            parts.setdefault(shard_of(job_id, len(self._shards)), {})[job_id] = cursor
        return parts


def _newest(
    pages: Mapping[int, Page], limit: int, *, oldest_ms: int
) -> tuple[list[JobRecord], dict[int, int]]:
    """The newest jobs of the pages, and how many of each page. None is older than `oldest_ms`."""

    def timed(shard: int, page: Page) -> Iterator[tuple[int, int, JobRecord]]:
        ms = 2**62
        for job in page.jobs:
            ms = job.created_ms or ms  # of a record that cannot be read it is not known
            yield -ms, shard, job

    jobs: list[JobRecord] = []
    taken = dict.fromkeys(pages, 0)
    read = 0
    streams = [timed(shard, page) for shard, page in pages.items()]
    for order, shard, job in heapq.merge(*streams, key=lambda each: each[:2]):
        if -order < oldest_ms or len(jobs) >= limit or read >= PAGE_BYTES:
            break
        jobs.append(job)
        taken[shard] += 1
        read += weight(job)
    return jobs, taken


def _packed(cursors: Sequence[str]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(cursors)).decode().rstrip("=")


def _summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            total[name] = total.get(name, 0) + count
    return total


def _united(parts: Iterable[Mapping[str, list[JobEvent]]]) -> dict[str, list[JobEvent]]:
    return {job_id: events for part in parts for job_id, events in part.items()}


class ShardedJournal:
    """The histories of the shards as one, in the order of their servers' clocks.

    Within a shard the order is exact. The plane's journal merges its streams by the numbers that
    their common database gives; here a position is that of each shard.
    """

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._shards = [StreamsJournal(redis, each) for each in shard_options(options)]
        self._check_shards = ShardCheck(redis, options)
        # Waits that go on until the next call of `wait`, with the cursor that they began at.
        self._waits: dict[int, tuple[str, asyncio.Task[list[JournalEvent]]]] = {}

    async def read(self, *, after: str = "", limit: int = 1000) -> list[JournalEvent]:
        """Events after a position, oldest first."""
        await self._check_shards()
        events: list[JournalEvent] = []
        while len(events) < limit:
            step = await self._step(events[-1].seq if events else after, limit - len(events))
            events += step
            if not step:
                break
        return events

    async def _step(self, after: str, limit: int) -> list[JournalEvent]:
        """Events up to the last one that was read of a shard, which may have more."""
        at = self._positions(after)
        pages = await gather_all(
            shard.read(after=cursor, limit=limit)
            for shard, cursor in zip(self._shards, at, strict=True)
        )
        merged: list[JournalEvent] = []
        for event, is_end in _merged(at, pages):
            merged.append(event)
            if is_end or len(merged) >= limit:
                break
        return merged

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        """Like `read`, but waits for the first event; `after` may be `NOW`."""
        await self._check_shards()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        at = self._positions(await self.last() if after == NOW else after)
        while True:
            left_ms = max(1, round((deadline - loop.time()) * 1000))
            waits = [self._wait_of(shard, cursor, left_ms) for shard, cursor in enumerate(at)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            pages = [wait.result() if wait.done() else [] for wait in waits]
            if any(pages) or loop.time() >= deadline:
                return [event for event, _ in _merged(at, pages)]

    def _wait_of(self, shard: int, after: str, wait_ms: int) -> asyncio.Task[list[JournalEvent]]:
        """The wait of a shard after this position: the one that runs, or a new one."""
        begun = self._waits.get(shard)
        if begun is not None:
            if begun[0] == after and (not begun[1].done() or _has_news(begun[1])):
                return begun[1]
            begun[1].cancel()
        journal = self._shards[shard]
        wait = asyncio.create_task(journal.wait(after=after, wait_ms=wait_ms))
        wait.add_done_callback(_seen)
        self._waits[shard] = after, wait
        return wait

    async def last(self) -> str:
        """The position of the newest event of each shard."""
        return _SEPARATOR.join(await gather_all(shard.last() for shard in self._shards))

    def since(self, ts_ms: int) -> str:
        """The position before every event since this time."""
        return _SEPARATOR.join(shard.since(ts_ms) for shard in self._shards)

    async def close(self) -> None:
        """Close the connections."""
        waits = [wait for _, wait in self._waits.values()]
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await self._redis.close()

    def _positions(self, after: str) -> list[str]:
        found = after.split(_SEPARATOR) if after else [""] * len(self._shards)
        if len(found) != len(self._shards) or not all(map(_POSITION.fullmatch, found)):
            raise UsageError(f"{after[:80]!r} is not a position of this journal", contract=CONTRACT)
        return found


def _merged(
    at: Sequence[str], pages: Sequence[Sequence[JournalEvent]]
) -> Iterator[tuple[JournalEvent, bool]]:
    """The events of the pages by time, with positions of the whole journal.

    With each, whether it is the last one of its page.
    """
    places = list(at)

    def ranked(shard: int, page: Sequence[JournalEvent]) -> Iterator[tuple[int, JournalEvent]]:
        return ((shard, event) for event in page)

    streams = [ranked(shard, page) for shard, page in enumerate(pages)]
    for shard, event in heapq.merge(
        *streams, key=lambda each: (each[1].ts_ms, _RANK.get(each[1].type, 1), each[0])
    ):
        places[shard] = event.seq
        is_end = event is pages[shard][-1]
        yield msgspec.structs.replace(event, seq=_SEPARATOR.join(places)), is_end


def _has_news(wait: asyncio.Task[list[JournalEvent]]) -> bool:
    return not wait.cancelled() and wait.exception() is None and bool(wait.result())


def _seen(wait: asyncio.Task[list[JournalEvent]]) -> None:
    """Mark the error of a wait as seen, also if nobody comes to take it."""
    if not wait.cancelled():
        wait.exception()
