"""Reads the events of followed jobs, once per gateway process, for all event streams of a queue.

The feed tails the journal, which names every job that changed, and reads the new events of the
followed jobs in one call. Foreign workers (of other implementations of a contract) write events but
no journal; `UnjournaledTail` waits for those. A sweep over all followed jobs, about once a second,
finds what both have missed, sends heartbeats and notices expired jobs. Without clients nothing is
read.

No client misses an event. The channel of a job has one position. A client becomes live only when
its own position has reached the channel's, and it drops events at or before its own position.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

import structlog

from tenure.core.encoding import sse_comment
from tenure.core.errors import ServerError, StoreError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.journal import JournalEvent
from tenure.core.redaction import Redaction
from tenure.core.seam import NOW, EventWaiter, Journal, is_full
from tenure.gateway.sse import (
    GONE,
    HEARTBEAT,
    Subscriber,
    end_others,
    end_replaced,
    frame,
    frame_without_id,
    position,
)

_log = structlog.get_logger("tenure.gateway")


_PAGE = 500
_CHUNK = 500
_CHUNK_EVENTS_MAX = 1000  # a ledger returns at most so many events of a job at once
_SWEEP_STEP = 50  # jobs that a sweep reads at a time; new events wait for such a step
_WAIT_MS = 2_000
_UNREACHABLE_S = 0.5
_SOON_S = 0.05
# After so many full pages in a row the reader skips to the end of the journal, reads all followed
# jobs instead, and pauses, so that clients get some of the time.
_FULL_PAGE = 100
_FULL_PAGES_MAX = 20
_PAUSE_S = 0.1
_WHILE_LEASED = frozenset({"extend", "report", "reject"})
_UNREADABLE = sse_comment("the events of this job cannot be read")

# The reader of unjournaled events waits for this long, so that clients that connect together share
# one read.
_GATHER_S = 0.002
# It always reads up to so many streams, and more only if there are foreign workers.
_FEW_STREAMS = 200
# A read costs store and gateway some microseconds per stream. The pause after it bounds the load.
_PAUSE_S_PER_STREAM = 2e-5


class FollowLedger(Protocol):
    """What the feed needs of a contract's ledger."""

    async def get(self, job_id: str) -> JobRecord | None:
        """The job; None if it does not exist or has expired."""

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """The events of one job after a cursor."""

    async def changes(self, cursors: Mapping[str, str]) -> dict[str, list[JobEvent]]:
        """The new events of many jobs, each after its own cursor, without waiting."""


class Feed:
    """The feed of one queue. `final` are the event types that end a stream."""

    def __init__(
        self,
        ledger: FollowLedger,
        journal: Journal,
        *,
        final: Iterable[str],
        sweep_ms: int = 1_000,
        heartbeat_ms: int = 15_000,
        client_bytes_max: int = 256 * 1024,
        on_events: Callable[[int], object] = lambda count: None,
        redaction: Redaction | None = None,
        waiter: EventWaiter | None = None,
    ) -> None:
        self._ledger = ledger
        self._journal = journal
        self._final = frozenset(final)
        self._heartbeat_s = heartbeat_ms / 1000
        self._sweep_s = min(sweep_ms, heartbeat_ms / 2) / 1000
        self._bytes_max = client_bytes_max
        self._on_events = on_events
        self._redaction = redaction or Redaction()
        self._channels: dict[str, _Channel] = {}
        self._followed = asyncio.Event()
        self._away = False
        self._tasks: list[asyncio.Task[None]] = []
        self._unjournaled: UnjournaledTail | None = None
        if waiter is not None:
            self._unjournaled = UnjournaledTail(
                waiter, cursors=self._unclaimed, deliver=self._deliver, read=self._read
            )

    @property
    def clients(self) -> int:
        """How many subscribers there are."""
        return sum(len(channel.subscribers) for channel in self._channels.values())

    def start(self) -> None:
        """Start to read; needs a running event loop."""
        self._tasks = [asyncio.create_task(self._tail()), asyncio.create_task(self._sweep())]
        if self._unjournaled is not None:
            self._tasks.append(asyncio.create_task(self._unjournaled.run()))

    async def close(self) -> None:
        """Stop reading; the streams should have been ended before."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def subscribe(
        self,
        job_id: str,
        after: str,
        *,
        masked: bool = False,
        origin: tuple[str, int] | None = None,
    ) -> Subscriber:
        """A new subscriber of a job, after a position ("" for all); call `leave` at the end.

        `masked` hides the secrets in the events: the client is not the job's requester. With
        `origin`, it ends when the job of this id has another one.
        """
        now_s = time.monotonic()
        channel = self._channels.get(job_id)
        if channel is None:
            channel = self._channels[job_id] = _Channel(job_id, now_s)
        subscriber = Subscriber(
            job_id, after, bytes_max=self._bytes_max, now_s=now_s, catch_up=self._catch_up
        )
        subscriber.page = _PAGE
        subscriber.masked = masked
        subscriber.origin = origin
        channel.subscribers.add(subscriber)
        self._followed.set()
        return subscriber

    def leave(self, subscriber: Subscriber) -> None:
        """Remove a subscriber, and the channel of its job if it was the last one."""
        channel = self._channels.get(subscriber.job_id)
        if channel is None:
            return
        channel.subscribers.discard(subscriber)
        if not channel.subscribers:
            del self._channels[subscriber.job_id]
            if not self._channels:
                self._followed.clear()

    async def _catch_up(self, subscriber: Subscriber) -> None:
        """Give a subscriber one page of older events; make it live when there are no more.

        Nothing is awaited between the last read and `live = True`, so no event is missed.
        """
        try:
            events = await self._read_older(subscriber)
        except Exception as error:
            if not _is_unreachable(error):
                _log.warning("events_unreadable", job_id=subscriber.job_id, error=str(error))
                subscriber.end(_UNREADABLE)
                return
            await asyncio.sleep(_UNREACHABLE_S)  # the client stays connected meanwhile
            return
        if subscriber.masked:
            events = await self._redaction.events(events, may_wait=True)
        more = is_full(events, subscriber.page)
        sent = given = 0
        for event in events:
            given += 1
            at, last = position(event.event_id), event.type in self._final
            sent += subscriber.event(event, frame(event), at=at, last=last)
            if subscriber.is_behind:
                more = True
                break
        self._on_events(sent)
        # The next page of a slow client is as large as what fitted: the rest would be read twice.
        subscriber.page = max(1, given) if subscriber.is_behind else _PAGE
        channel = self._channels.get(subscriber.job_id)
        if channel is None or more:
            return
        if events and channel.event_id is not None and subscriber.cursor < channel.cursor:
            return  # the channel has advanced meanwhile: read once more
        # A made-up Last-Event-ID may be in the future, so the channel takes the lowest position.
        behind = channel.event_id is None or subscriber.cursor < channel.cursor
        if behind:
            channel.event_id, channel.cursor = subscriber.event_id, subscriber.cursor
        if self._unjournaled is not None and (behind or not channel.has_live):
            self._unjournaled.add()
        subscriber.live = True

    async def _read_older(self, subscriber: Subscriber) -> list[JobEvent]:
        events = await self._ledger.events(
            subscriber.job_id, after=subscriber.event_id, limit=subscriber.page
        )
        await end_replaced(self._ledger.get, [subscriber] if events else [])
        return [] if subscriber.ended else events

    async def _tail(self) -> None:
        """Follow the journal while a client follows a job."""
        after, full_pages = NOW, 0
        while True:
            if not self._channels:
                after = NOW
                await self._followed.wait()
            try:
                events = await self._journal.wait(after=after, wait_ms=_WAIT_MS)
                if events:
                    after = events[-1].seq
                    full_pages = full_pages + 1 if len(events) >= _FULL_PAGE else 0
                    self._note_claims(events)
                    await self._read({event.job_id for event in events} & self._channels.keys())
                    removed = {event.job_id for event in events if event.type == "remove"}
                    await end_replaced(self._ledger.get, self._followers(removed))
                if full_pages >= _FULL_PAGES_MAX:
                    after, full_pages = NOW, 0
                    await asyncio.sleep(_PAUSE_S)
                    await self._read(self._channels)
                self._log_store(None)
            except Exception as error:
                self._log_store(error)
                after = NOW
                await asyncio.sleep(_UNREACHABLE_S)

    def _note_claims(self, events: Iterable[JournalEvent]) -> None:
        """Note which followed jobs are leased by a worker of ours, whose events are journaled."""
        released = False
        for event in events:
            channel = self._channels.get(event.job_id)
            if channel is not None and event.type not in _WHILE_LEASED:
                was, channel.journaled = channel.journaled, event.type == "claim"
                released |= was and not channel.journaled
        if released and self._unjournaled is not None:
            self._unjournaled.add()  # the next worker may be a foreign one

    def _unclaimed(self, most: float) -> dict[str, str]:
        """The positions of jobs with live clients that no worker of ours has leased.

        {} if there are more than `most`.
        """
        found: dict[str, str] = {}
        for job_id, channel in self._channels.items():
            if channel.event_id is not None and channel.has_live and not channel.journaled:
                if len(found) >= most:
                    return {}
                found[job_id] = channel.event_id
        return found

    async def _sweep(self) -> None:
        """For all clients: heartbeats, events that the journal did not name, and expired jobs."""
        while True:
            first = not self._channels
            await self._followed.wait()
            # Soon after the first client: it may have missed events before the tail started.
            await asyncio.sleep(_SOON_S if first else self._step_pause_s())
            try:
                if self._unjournaled is not None:
                    await self._unjournaled.check_foreign()
                await self._sweep_once()
            except Exception as error:
                self._log_store(error)
                self._beat(self._channels, time.monotonic())  # also those the sweep did not reach
                await asyncio.sleep(_UNREACHABLE_S)

    def _log_store(self, error: Exception | None) -> None:
        """Log once that the store is unreachable and once that it answers; the feed goes on."""
        if error is not None and not _is_unreachable(error):
            _log.error("feed_failed", exc_info=error)
        elif error is not None and not self._away:
            self._away = True
            _log.warning("feed_store_away", error=str(error))
        elif error is None and self._away:
            self._away = False
            _log.info("feed_store_back")

    def _step_pause_s(self) -> float:
        """The pause between two steps of a sweep, which spreads them over its interval."""
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

    def _beat(self, job_ids: Iterable[str], now_s: float) -> None:
        for job_id in job_ids:
            channel = self._channels.get(job_id)
            for subscriber in channel.subscribers if channel else ():
                if now_s - subscriber.pushed_s >= self._heartbeat_s:
                    subscriber.pushed_s = now_s
                    subscriber.push(HEARTBEAT)

    async def _read(self, followed: Iterable[str]) -> None:
        """Read and deliver the new events of these jobs, in bounded steps."""
        job_ids = list(followed)
        while job_ids:
            step, job_ids = job_ids[:_CHUNK], job_ids[_CHUNK:]
            cursors = {
                job_id: channel.event_id
                for job_id in step
                if (channel := self._channels.get(job_id)) and channel.event_id is not None
            }
            if not cursors:
                continue
            changed, unreadable = await _read_changes(self._ledger, cursors)
            new = [job_id for job_id, events in changed.items() if events]
            await end_replaced(self._ledger.get, self._followers(new))
            for job_id, events in changed.items():
                if await self._deliver(job_id, events):
                    job_ids.append(job_id)
            for job_id in unreadable:
                self._end(job_id, _UNREADABLE)

    def _followers(self, job_ids: Iterable[str]) -> list[Subscriber]:
        found = (self._channels.get(job_id) for job_id in job_ids)
        return [each for channel in found if channel for each in channel.subscribers]

    async def _deliver(self, job_id: str, events: list[JobEvent]) -> bool:
        masked = None
        if self._masks(job_id):
            masked = await self._redaction.events(events, may_wait=True)
        return self._push(job_id, events, masked)

    def _masks(self, job_id: str) -> bool:
        channel = self._channels.get(job_id)
        return channel is not None and any(each.masked for each in channel.subscribers)

    def _push(
        self, job_id: str, events: list[JobEvent], masked: list[JobEvent] | None = None
    ) -> bool:
        """Push a job's new events to its live subscribers; True if there may be more."""
        channel = self._channels.get(job_id)
        if channel is None or not events:
            return False
        now_s = time.monotonic()
        sent = 0
        for event, hidden in zip(events, masked or events, strict=True):
            at = position(event.event_id)
            if at <= channel.cursor:
                continue
            channel.event_id, channel.cursor = event.event_id, at
            framed, last = {False: frame(event)}, event.type in self._final
            if self._masks(job_id):
                # Without masked events, the subscriber came after the events were read.
                framed[True] = frame(hidden if masked else self._redaction.event(event))
            for subscriber in channel.subscribers:
                own = framed[subscriber.masked]
                if subscriber.live and subscriber.event(event, own, at=at, last=last):
                    subscriber.pushed_s = now_s
                    sent += 1
        self._on_events(sent)
        return is_full(events, _CHUNK_EVENTS_MAX)

    async def _check(self, job_ids: list[str], now_s: float) -> None:
        """Check once per heartbeat whether a job still exists, and whether it has ended."""
        due = [
            channel
            for job_id in job_ids
            if (channel := self._channels.get(job_id))
            and now_s - channel.checked_s >= self._heartbeat_s
        ]
        records = await asyncio.gather(*(self._ledger.get(each.job_id) for each in due))
        for channel, record in zip(due, records, strict=True):
            channel.checked_s = now_s
            end_others(channel.subscribers, record)
            self._end_if_over(channel, record)

    def _end_if_over(self, channel: _Channel, record: JobRecord | None) -> None:
        """End the streams of a job that has expired, or that ended without an event.

        A foreign worker writes first the state and then the event, so a job counts as ended only
        if two checks found it in a final state.
        """
        if record is None:
            last = GONE
        elif record.state in self._final and channel.looks_over:
            over = JobEvent(
                event_id="",
                type=record.state,
                ts_ms=record.updated_ms,
                step="gateway.observed",
                data=b'{"note":"the worker stored this state without an event"}',
            )
            last = frame_without_id(over)
        else:
            channel.looks_over = record.state in self._final
            return
        self._end(channel.job_id, last)

    def _end(self, job_id: str, last: bytes) -> None:
        channel = self._channels.get(job_id)
        for subscriber in list(channel.subscribers) if channel else ():
            subscriber.end(last)


class _Channel:
    """The subscribers of one job, and the position up to which the live ones have its events."""

    __slots__ = (
        "checked_s", "cursor", "event_id", "job_id", "journaled", "looks_over", "subscribers",
    )  # fmt: skip

    def __init__(self, job_id: str, now_s: float) -> None:
        self.job_id = job_id
        self.subscribers: set[Subscriber] = set()
        self.event_id: str | None = None
        self.cursor: tuple[int, ...] = ()
        self.checked_s = now_s
        self.looks_over = False
        self.journaled = False  # leased by a worker of ours: the journal names its events

    @property
    def has_live(self) -> bool:
        """Whether a subscriber waits for the next event."""
        return any(each.live and not each.ended for each in self.subscribers)


class UnjournaledTail:
    """Reads the events of foreign workers, which the journal does not name.

    A foreign worker appends to the job's event stream and writes no journal. One blocking read over
    the streams of the followed jobs returns its events as they happen. Jobs that a worker of ours
    has leased are left out. With many followed jobs this runs only while the queue has foreign
    workers. `cursors` returns the jobs to read, {} if there are more than its argument. `deliver`
    takes their events; `read` finds an unreadable stream.
    """

    def __init__(
        self,
        ledger: EventWaiter,
        *,
        cursors: Callable[[float], dict[str, str]],
        deliver: Callable[[str, list[JobEvent]], Awaitable[object]],
        read: Callable[[list[str]], Awaitable[None]],
    ) -> None:
        self._ledger = ledger
        self._cursors = cursors
        self._deliver = deliver
        self._read = read
        self._changed = asyncio.Event()
        self._waiting = False
        self._interrupting: asyncio.Task[None] | None = None
        self.foreign = False

    def add(self) -> None:
        """Restart the wait, because there are more jobs to read."""
        self._changed.set()
        if self._waiting and (self._interrupting is None or self._interrupting.done()):
            self._interrupting = asyncio.create_task(self._interrupt())

    async def check_foreign(self) -> None:
        """Check whether the queue has foreign workers."""
        was, self.foreign = self.foreign, await self._ledger.has_foreign_workers()
        if self.foreign and not was:
            self.add()

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            self._changed.clear()
            cursors = self._cursors(math.inf if self.foreign else _FEW_STREAMS)
            if not cursors:
                await self._changed.wait()
                await asyncio.sleep(_GATHER_S)
                continue
            self._waiting = True
            try:
                changes = await self._ledger.wait_changes(cursors, wait_ms=_WAIT_MS)
            except Exception as error:
                await self._recover(error, list(cursors))
                continue
            finally:
                self._waiting = False
            for job_id, events in changes.items():
                await self._deliver(job_id, events)
            await asyncio.sleep(len(cursors) * _PAUSE_S_PER_STREAM)

    async def _recover(self, error: Exception, job_ids: list[str]) -> None:
        """After a failed wait: find the unreadable stream, and pause."""
        if not _is_unreachable(error):
            try:
                await self._read(job_ids)
            except Exception as failed:
                if not _is_unreachable(failed):
                    _log.error("feed_failed", exc_info=failed)
        await asyncio.sleep(_UNREACHABLE_S)

    async def _interrupt(self) -> None:
        try:
            await self._ledger.interrupt()
        except Exception as error:  # while the store is unreachable, the wait ends by itself
            if not _is_unreachable(error):
                raise


def _is_unreachable(error: Exception) -> bool:
    """Whether the store itself fails, so that waiting helps."""
    wrong_type = isinstance(error, ServerError) and str(error.reply).startswith("WRONGTYPE")
    return isinstance(error, StoreError) and not wrong_type


async def _read_changes(
    ledger: FollowLedger, cursors: Mapping[str, str]
) -> tuple[dict[str, list[JobEvent]], list[str]]:
    """The new events by job, and the jobs that cannot be read, found by bisection.

    A key of the wrong type, written by another program, must not stop the other streams.
    """
    try:
        return await ledger.changes(cursors), []
    except Exception as error:
        if _is_unreachable(error):
            raise
        if len(cursors) == 1:
            _log.warning("events_unreadable", job_id=next(iter(cursors)), error=str(error))
            return {}, list(cursors)
    pairs = list(cursors.items())
    left, left_bad = await _read_changes(ledger, dict(pairs[: len(pairs) // 2]))
    right, right_bad = await _read_changes(ledger, dict(pairs[len(pairs) // 2 :]))
    return left | right, left_bad + right_bad
