"""The one reader of a queue in a process: it serves the events and the ends of all jobs.

It tails the queue's journal, which names every job that moved, with one blocking call whatever the
number of followers. It reads the new events of the followed jobs in one call, and the record of a
job whose end is awaited when the journal names its end. Foreign workers write events but no
journal: `UnjournaledTail` waits for theirs. A sweep, about once a second, finds what both have
missed and notices jobs that have expired. Without followers nothing is read.

No follower misses an event: the channel of a job has one position, a follower joins it only when
its own position has reached the channel's, and each drops the events at or before its own. No end
is missed: the record is read after the position in the journal is fixed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from tenure.client.events import (
    AWAY_S,
    FEW_STREAMS,
    WAIT_MS,
    FollowLedger,
    UnjournaledTail,
    is_away,
    logger,
    read_changes,
)
from tenure.core.errors import UsageError
from tenure.core.job import JobEvent, JobRecord, position
from tenure.core.journal import JournalEvent
from tenure.core.seam import EventWaiter, is_full

PAGE = 500
"""How many older events a follower reads at once."""
_CHUNK = 500
CHUNK_EVENTS_MAX = 1000
"""A ledger returns at most this many events of a job at once."""
_SWEEP_STEP = 50  # jobs that a sweep looks at in one go; events that come meanwhile wait for it
_SOON_S = 0.05
# After this many full pages of the journal in a row the reader skips to the end of the journal,
# looks at all followed jobs instead, and pauses, so that the clients get some of the time.
_FULL_PAGE = 100
_FULL_PAGES_MAX = 20
_PAUSE_S = 0.1
_WHILE_LEASED = frozenset({"extend", "report", "reject"})
_CANCEL_S = 0.2
# Records whose end is awaited are read again after this time, at most this many in one sweep.
_CHECK_S = 2.0
_CHECKS_MAX = 100


class News(Protocol):
    """What names the jobs that move: a queue's journal, or what its contract has instead."""

    async def last(self) -> str:
        """The position of the newest event."""

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        """Events after a position; waits for the first."""


class Follower(Protocol):
    """A reader of one job's events.

    It first reads older events, page by page, at its own pace; `event_id` and `cursor` say how far
    it is. Then it is `live`, and the feed gives it new events.
    """

    job_id: str
    event_id: str
    cursor: tuple[int, ...]
    live: bool
    page: int

    @property
    def ended(self) -> bool:
        """Whether it takes no more events."""

    def take(self, event: JobEvent, *, at: tuple[int, ...], last: bool) -> bool:
        """Take one event, `last` of the job; False where it must read that one again later."""

    def finish(self, last: JobEvent | None) -> None:
        """There will be no more events: take this one, or None if the job cannot be read."""


F = TypeVar("F", bound=Follower)


class JobFeed(Generic[F]):
    """Serves one queue. `final` are the states and event types that end a job.

    `few_streams` is how many jobs the tail for unjournaled events reads although no foreign
    worker was seen. A subclass may give events to its followers in its own way.
    """

    def __init__(
        self,
        ledger: FollowLedger,
        journal: News,
        *,
        final: Iterable[str],
        sweep_ms: int = 1_000,
        heartbeat_ms: int = 15_000,
        few_streams: int = FEW_STREAMS,
        waiter: EventWaiter | None = None,
    ) -> None:
        self._ledger = ledger
        self._journal = journal
        self._final = frozenset(final)
        self._heartbeat_s = heartbeat_ms / 1000
        self._sweep_s = min(sweep_ms, heartbeat_ms / 2) / 1000
        self._channels: dict[str, Channel[F]] = {}
        self._ends: dict[str, _AwaitedEnd] = {}
        self._followed = asyncio.Event()
        self._settled = asyncio.Event()
        self._away = False
        self.closed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._unjournaled: UnjournaledTail | None = None
        if waiter is not None:
            self._unjournaled = UnjournaledTail(
                waiter,
                cursors=self._unclaimed,
                deliver=self._deliver,
                read=self._read,
                few_streams=few_streams,
            )

    @property
    def clients(self) -> int:
        """How many followers there are."""
        return sum(len(channel.followers) for channel in self._channels.values())

    def start(self) -> None:
        """Begin to read; needs the running loop."""
        self._tasks = [asyncio.create_task(self._tail()), asyncio.create_task(self._sweep())]
        if self._unjournaled is not None:
            self._tasks.append(asyncio.create_task(self._unjournaled.run()))

    async def close(self) -> None:
        """Stop reading; anyone who still waits gets an error."""
        self.closed = True
        running = set(self._tasks)
        while running:  # `asyncio.wait_for` of Python 3.11 may lose a cancel: cancel until they end
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=_CANCEL_S)
        self._settled.set()
        for awaited in self._ends.values():
            awaited.fail(UsageError("the queue was closed while the end of a job was awaited"))
        for job_id in list(self._channels):
            self._end(job_id, None)

    def follow(self, follower: F) -> F:
        """Add a follower of a job; `leave` when it is done."""
        channel = self._channels.get(follower.job_id)
        if channel is None:
            channel = self._channels[follower.job_id] = Channel(follower.job_id, time.monotonic())
        channel.followers.add(follower)
        self._followed.set()
        return follower

    def leave(self, follower: F) -> None:
        """Forget a follower, and its job if it was the last one."""
        channel = self._channels.get(follower.job_id)
        if channel is None:
            return
        channel.followers.discard(follower)
        if not channel.followers:
            del self._channels[follower.job_id]
            self._check_followed()

    async def end_of(self, job_id: str) -> JobRecord | None:
        """The record of a job as soon as it has ended, None if there is none (any more).

        Raises `StoreError` if the store is unreachable now; if that happens later, it waits on.
        """
        awaited = self._ends.setdefault(job_id, _AwaitedEnd(time.monotonic()))
        ended: asyncio.Future[JobRecord | None] = asyncio.get_running_loop().create_future()
        awaited.futures.add(ended)
        self._followed.set()
        try:
            await self._settled.wait()
            record = await self._ledger.get(job_id)
            if record is None or record.state in self._final:
                return record
            return await ended
        finally:
            awaited.futures.discard(ended)
            if ended.done() and not ended.cancelled():
                ended.exception()  # seen, though the record was there first
            if not awaited.futures and self._ends.get(job_id) is awaited:
                del self._ends[job_id]
                self._check_followed()

    def _check_followed(self) -> None:
        if not self._channels and not self._ends:
            self._followed.clear()

    async def settled(self) -> None:
        """Return when every later event will be seen, or the store does not answer."""
        await self._settled.wait()

    async def catch_up(self, follower: F) -> None:
        """Give one page of older events; the follower joins the channel when there are no more.

        Nothing is awaited between the last read and `live`, so no event is missed.
        """
        try:
            events = await self._ledger.events(
                follower.job_id, after=follower.event_id, limit=follower.page
            )
            if events:
                await self._end_replaced([follower])
                events = [] if follower.ended else events
        except Exception as error:
            if not is_away(error):
                logger().warning("events_unreadable", job_id=follower.job_id, error=str(error))
                follower.finish(None)
                return
            await asyncio.sleep(AWAY_S)  # the follower keeps its position meanwhile
            return
        more = is_full(events, follower.page)
        more = not await self._give(follower, events) or more
        channel = self._channels.get(follower.job_id)
        if channel is None or more:
            return
        if events and channel.event_id is not None and follower.cursor < channel.cursor:
            return  # the channel went on meanwhile: read once more
        # A client may invent a position in the future: the lowest position is the channel's.
        behind = channel.event_id is None or follower.cursor < channel.cursor
        if behind:
            channel.event_id, channel.cursor = follower.event_id, follower.cursor
        if self._unjournaled is not None and (behind or not channel.has_live):
            self._unjournaled.add()
        follower.live = True

    async def _give(self, follower: F, events: list[JobEvent]) -> bool:
        """Give a page of older events; False if the follower did not take all of them.

        An end with events behind it is not the last: the job was sent back.
        """
        at_end = not is_full(events, follower.page)
        for event in events:
            last = at_end and event is events[-1] and event.type in self._final
            if not follower.take(event, at=position(event.event_id), last=last):
                return False
        return True

    async def _tail(self) -> None:
        """Follow the journal while a job is followed."""
        after: str | None = None
        full_pages, lost = 0, False
        while True:
            if not self._followed.is_set():
                after = None
                self._settled.clear()
                await self._followed.wait()
            try:
                if after is None:
                    after = await self._journal.last()
                    self._settled.set()
                    if lost:  # what happened since the position that was lost
                        lost = False
                        await self._read(self._channels)
                        await self._resolve(list(self._ends))
                events = await self._journal.wait(after=after, wait_ms=WAIT_MS)
                if events:
                    after = events[-1].seq
                    full_pages = full_pages + 1 if len(events) >= _FULL_PAGE else 0
                    await self._read_named(events)
                if full_pages >= _FULL_PAGES_MAX:
                    after, full_pages, lost = None, 0, True
                    await asyncio.sleep(_PAUSE_S)
                self._log_store(None)
            except Exception as error:
                self._log_store(error)
                self._settled.set()  # whoever waits for it asks the store, and gets the error
                after, lost = None, True
                await asyncio.sleep(AWAY_S)

    async def _read_named(self, events: list[JournalEvent]) -> None:
        """Read the new events and the ends of followed jobs that the journal names."""
        self._note_claims(events)
        if self._ends:
            final = self._final
            ended = {e.job_id for e in events if e.to_state in final or e.type in final}
            await self._resolve([job_id for job_id in ended if job_id in self._ends])
        await self._read({event.job_id for event in events} & self._channels.keys())
        removed = {event.job_id for event in events if event.type == "remove"}
        await self._end_replaced(self._followers(removed))

    async def _resolve(self, job_ids: list[str]) -> None:
        """Read these records, and give those that have ended to whoever awaits them."""
        now_s = time.monotonic()
        for start in range(0, len(job_ids), _CHUNK):
            step = job_ids[start : start + _CHUNK]
            answers = await asyncio.gather(*map(self._ledger.get, step), return_exceptions=True)
            for job_id, answer in zip(step, answers, strict=True):
                awaited = self._ends.get(job_id)
                if awaited is None:
                    continue
                if isinstance(answer, BaseException):
                    if not isinstance(answer, Exception) or is_away(answer):
                        raise answer
                    awaited.fail(answer)
                elif answer is None or answer.state in self._final:
                    awaited.resolve(answer)
                awaited.checked_s = now_s

    def _note_claims(self, events: Iterable[JournalEvent]) -> None:
        let_go = False
        for event in events:
            channel = self._channels.get(event.job_id)
            if channel is not None and event.type not in _WHILE_LEASED:
                was, channel.journaled = channel.journaled, event.type == "claim"
                let_go |= was and not channel.journaled
        if let_go and self._unjournaled is not None:
            self._unjournaled.add()  # the next worker may be one that writes no journal

    def _unclaimed(self, most: float) -> dict[str, str]:
        """The position in each job that is followed live and that no worker of ours holds.

        {} if there are more.
        """
        found: dict[str, str] = {}
        for job_id, channel in self._channels.items():
            if channel.event_id is not None and channel.has_live and not channel.journaled:
                if len(found) >= most:
                    return {}
                found[job_id] = channel.event_id
        return found

    async def _sweep(self) -> None:
        """Find events that no journal named, and jobs that are gone, for all followers."""
        while True:
            first = not self._followed.is_set()
            await self._followed.wait()
            # Events between the first follower's read and the start of the tail are found soon.
            await asyncio.sleep(_SOON_S if first else self._step_pause_s())
            try:
                if self._unjournaled is not None:
                    await self._unjournaled.check_foreign()
                await self._sweep_once()
            except Exception as error:
                self._log_store(error)
                self._beat(self._channels, time.monotonic())  # also those that it did not reach
                await asyncio.sleep(AWAY_S)

    def _log_store(self, trouble: Exception | None) -> None:
        """Log once that the store is unreachable and once that it is back; never give up."""
        if trouble is not None and not is_away(trouble):
            logger().error("feed_failed", exc_info=trouble)
        elif trouble is not None and not self._away:
            self._away = True
            logger().warning("feed_store_away", error=str(trouble))
        elif trouble is None and self._away:
            self._away = False
            logger().info("feed_store_back")

    def _step_pause_s(self) -> float:
        """The pause between two steps of a sweep, which spreads the sweep over its interval."""
        return self._sweep_s * _SWEEP_STEP / max(len(self._channels), _SWEEP_STEP)

    async def _sweep_once(self) -> None:
        """One sweep over all followed jobs, in steps spread over the interval."""
        job_ids = list(self._channels)
        pause_s = self._step_pause_s()
        for start in range(0, len(job_ids), _SWEEP_STEP):
            step = job_ids[start : start + _SWEEP_STEP]
            self._beat(step, time.monotonic())
            await self._read(step)
            await self._check(step, time.monotonic())
            if start + _SWEEP_STEP < len(job_ids):
                await asyncio.sleep(pause_s)
        latest_s = time.monotonic() - _CHECK_S
        old = [job_id for job_id, end in self._ends.items() if end.checked_s <= latest_s]
        await self._resolve(sorted(old, key=lambda each: self._ends[each].checked_s)[:_CHECKS_MAX])

    def _beat(self, job_ids: Iterable[str], now_s: float) -> None:
        """Called for every followed job about once a sweep, also while the store is unreachable."""

    async def _read(self, names: Iterable[str]) -> None:
        """Fetch and hand out what is new in these jobs, in bounded steps."""
        job_ids = list(names)
        while job_ids:
            step, job_ids = job_ids[:_CHUNK], job_ids[_CHUNK:]
            cursors = {
                job_id: channel.event_id
                for job_id in step
                if (channel := self._channels.get(job_id)) and channel.event_id is not None
            }
            if not cursors:
                continue
            changed, unreadable = await read_changes(self._ledger, cursors)
            new = [job_id for job_id, events in changed.items() if events]
            await self._end_replaced(self._followers(new))
            for job_id, events in changed.items():
                if await self._deliver(job_id, events):
                    job_ids.append(job_id)
            for job_id in unreadable:
                self._end(job_id, None)

    def _followers(self, job_ids: Iterable[str]) -> list[F]:
        found = (self._channels.get(job_id) for job_id in job_ids)
        return [each for channel in found if channel for each in channel.followers]

    async def _end_replaced(self, followers: Iterable[F]) -> None:
        """Called before events are delivered: end followers of an earlier job of that id."""

    def _end_others(self, followers: Iterable[F], record: JobRecord | None) -> None:
        """Called with the record of a job: end followers of an earlier job of that id."""

    async def _deliver(self, job_id: str, events: list[JobEvent]) -> bool:
        """Give one job's new events to its live followers; True if there may be more."""
        channel = self._channels.get(job_id)
        if channel is None or not events:
            return False
        for event, at in channel.new(events):
            for follower in list(channel.followers):
                if follower.live:
                    follower.take(event, at=at, last=event.type in self._final)
        return is_full(events, CHUNK_EVENTS_MAX)

    async def _check(self, job_ids: list[str], now_s: float) -> None:
        """Ask once per heartbeat whether a job still exists, and whether it is over."""
        due = [
            channel
            for job_id in job_ids
            if (channel := self._channels.get(job_id))
            and now_s - channel.checked_s >= self._heartbeat_s
        ]
        records = await asyncio.gather(*(self._ledger.get(each.job_id) for each in due))
        for channel, record in zip(due, records, strict=True):
            channel.checked_s = now_s
            self._end_others(channel.followers, record)
            self._end_if_over(channel, record)

    def _end_if_over(self, channel: Channel[F], record: JobRecord | None) -> None:
        """End the stream of a job that is gone, or that ended without an event.

        A foreign worker writes state and event one after the other, so a job counts as ended only
        if it has looked so in two checks.
        """
        if record is None:
            gone = JobEvent(event_id="", type="expired", ts_ms=0, step="gateway.expired")
            self._end(channel.job_id, gone)
        elif record.state in self._final and channel.looks_over:
            over = JobEvent(
                event_id="",
                type=record.state,
                ts_ms=record.updated_ms,
                step="gateway.observed",
                data=b'{"note":"the worker stored this state without an event"}',
            )
            self._end(channel.job_id, over)
        else:
            channel.looks_over = record.state in self._final

    def _end(self, job_id: str, last: JobEvent | None) -> None:
        """End the followers of a job; without a last event it cannot be read."""
        channel = self._channels.get(job_id)
        for follower in list(channel.followers) if channel else ():
            follower.finish(last)


class _AwaitedEnd:
    """Those who wait for the end of one job, and when its record was last read."""

    __slots__ = ("checked_s", "futures")

    def __init__(self, now_s: float) -> None:
        self.futures: set[asyncio.Future[JobRecord | None]] = set()
        self.checked_s = now_s

    def resolve(self, record: JobRecord | None) -> None:
        for future in self.futures:
            if not future.done():
                future.set_result(record)

    def fail(self, error: Exception) -> None:
        for future in self.futures:
            if not future.done():
                future.set_exception(error)


class Channel(Generic[F]):
    """The followers of one job, and the position up to which the live ones were served."""

    __slots__ = (
        "checked_s", "cursor", "event_id", "followers", "job_id", "journaled", "looks_over",
    )  # fmt: skip

    def __init__(self, job_id: str, now_s: float) -> None:
        self.job_id = job_id
        self.followers: set[F] = set()
        self.event_id: str | None = None
        self.cursor: tuple[int, ...] = ()
        self.checked_s = now_s
        self.looks_over = False
        self.journaled = False  # a worker of ours holds the job: the journal names its events

    @property
    def has_live(self) -> bool:
        """Whether a follower waits for the next event."""
        return any(each.live and not each.ended for each in self.followers)

    def new(self, events: Iterable[JobEvent]) -> Iterator[tuple[JobEvent, tuple[int, ...]]]:
        """The events that come after the channel's position, which moves on to each of them."""
        for event in events:
            at = position(event.event_id)
            if at > self.cursor:
                self.event_id, self.cursor = event.event_id, at
                yield event, at
