"""The one reader of a gateway process: it serves the events of all jobs to all clients.

It tails the queue's journal, which names every job that moved, and reads the new events of the
followed jobs in one call. Workers of other makes write events but no journal: `UnjournaledTail`
waits for theirs. A sweep over all followed jobs, about once a second, finds what both have missed,
sends heartbeats and notices jobs that have expired. Without clients nothing is read.

No client misses an event: the channel of a job has one position, a client joins it only when its
own position has reached the channel's, and each drops the events at or before its own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol, runtime_checkable

import structlog

from tenure.core.errors import ServerError, StoreError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.journal import JournalEvent
from tenure.core.redaction import Redaction
from tenure.core.seam import Journal, is_full
from tenure.gateway.sse import HEARTBEAT, Subscriber, comment, frame, position, unnumbered

_log = structlog.get_logger("tenure.gateway")


_NOW = "$"
_PAGE = 500
_CHUNK = 500
_CHUNK_EVENTS_MAX = 1000  # a ledger returns at most so many events of a job at once
_SWEEP_STEP = 50  # jobs that a sweep looks at in one go; events that come meanwhile wait for it
_WAIT_MS = 2_000
_AWAY_S = 0.5
_SOON_S = 0.05
# After so many full pages of the journal in a row the reader skips to the end of the journal, looks
# at all followed jobs instead, and pauses, so that the clients get some of the time.
_FULL_PAGE = 100
_FULL_PAGES_MAX = 20
_PAUSE_S = 0.1
_OF_HOLDERS = frozenset({"extend", "report", "reject"})
_EXPIRED = comment("the job has expired")
_UNREADABLE = comment("the events of this job cannot be read")

# The reader of unjournaled events waits for this long, so that clients that come together are read
# together.
_GATHER_S = 0.002
# It always reads up to so many streams, and more only if there are workers of another make.
_FEW_STREAMS = 200
# A read costs store and gateway some microseconds a stream. The pause after it bounds that share.
_PAUSE_S_PER_STREAM = 2e-5


class FollowLedger(Protocol):
    """What the feed needs of a contract's ledger."""

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None if there is none (any more)."""

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """Events of one job after a cursor."""

    async def changes(self, cursors: Mapping[str, str]) -> dict[str, list[JobEvent]]:
        """New events of many jobs, each after its own cursor, without waiting."""


@runtime_checkable
class WaitingLedger(Protocol):
    """A ledger that can wait for the events of many jobs at once."""

    async def wait_changes(
        self, cursors: Mapping[str, str], *, wait_ms: int
    ) -> dict[str, list[JobEvent]]:
        """New events of many jobs, each after its cursor; waits for the first."""

    async def interrupt(self) -> None:
        """End the wait of `wait_changes` now."""

    async def has_foreign_workers(self) -> bool:
        """Whether workers of another make take jobs from the queue."""


class Feed:
    """Serves one queue. `final` are the event types that end a stream."""

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
        if isinstance(ledger, WaitingLedger):
            self._unjournaled = UnjournaledTail(
                ledger, cursors=self._unclaimed, hand_out=self._deliver, read=self._read
            )

    @property
    def clients(self) -> int:
        """How many subscribers there are."""
        return sum(len(channel.subscribers) for channel in self._channels.values())

    def start(self) -> None:
        """Begin to read; needs the running loop."""
        self._tasks = [asyncio.create_task(self._tail()), asyncio.create_task(self._sweep())]
        if self._unjournaled is not None:
            self._tasks.append(asyncio.create_task(self._unjournaled.run()))

    async def close(self) -> None:
        """Stop reading; clients should have been ended before."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def subscribe(self, job_id: str, after: str, *, masked: bool = False) -> Subscriber:
        """A new follower of a job, after a position ("" for all); `leave` when it is done.

        `masked` hides the secrets in the events: the follower is not the job's requester.
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
        channel.subscribers.add(subscriber)
        self._followed.set()
        return subscriber

    def leave(self, subscriber: Subscriber) -> None:
        """Forget a subscriber, and its job if it was the last one."""
        channel = self._channels.get(subscriber.job_id)
        if channel is None:
            return
        channel.subscribers.discard(subscriber)
        if not channel.subscribers:
            del self._channels[subscriber.job_id]
            if not self._channels:
                self._followed.clear()

    async def _catch_up(self, subscriber: Subscriber) -> None:
        """Hand over one page of older events; join the channel when there are no more.

        Nothing is awaited between the last read and `live`, so no event is missed.
        """
        try:
            events = await self._ledger.events(
                subscriber.job_id, after=subscriber.event_id, limit=subscriber.page
            )
        except Exception as error:
            if not _is_away(error):
                _log.warning("events_unreadable", job_id=subscriber.job_id, error=str(error))
                subscriber.end(_UNREADABLE)
                return
            await asyncio.sleep(_AWAY_S)  # the client keeps its place while the store is away
            return
        if subscriber.masked:
            events = await self._redaction.events(events, patient=True)
        more = is_full(events, subscriber.page)
        served = given = 0
        for event in events:
            given += 1
            at, last = position(event.event_id), event.type in self._final
            served += subscriber.event(event, frame(event), at=at, last=last)
            if subscriber.is_behind:
                more = True
                break
        self._on_events(served)
        # A client that is behind gets no more than it was just given: the rest would be read twice.
        subscriber.page = max(1, given) if subscriber.is_behind else _PAGE
        channel = self._channels.get(subscriber.job_id)
        if channel is None or more:
            return
        if events and channel.event_id is not None and subscriber.cursor < channel.cursor:
            return  # the channel went on meanwhile: read once more
        # A made-up Last-Event-ID may lie in the future: the lowest position is the channel's.
        behind = channel.event_id is None or subscriber.cursor < channel.cursor
        if behind:
            channel.event_id, channel.cursor = subscriber.event_id, subscriber.cursor
        if self._unjournaled is not None and (behind or not channel.has_live):
            self._unjournaled.add()
        subscriber.live = True

    async def _tail(self) -> None:
        """Follow the journal while a client follows a job."""
        after, full_pages = _NOW, 0
        while True:
            if not self._channels:
                after = _NOW
                await self._followed.wait()
            try:
                events = await self._journal.wait(after=after, wait_ms=_WAIT_MS)
                if events:
                    after = events[-1].seq
                    full_pages = full_pages + 1 if len(events) >= _FULL_PAGE else 0
                    self._note_holders(events)
                    await self._read({event.job_id for event in events} & self._channels.keys())
                if full_pages >= _FULL_PAGES_MAX:
                    after, full_pages = _NOW, 0
                    await asyncio.sleep(_PAUSE_S)
                    await self._read(self._channels)
                self._store_is(None)
            except Exception as error:
                self._store_is(error)
                after = _NOW
                await asyncio.sleep(_AWAY_S)

    def _note_holders(self, events: Iterable[JournalEvent]) -> None:
        let_go = False
        for event in events:
            channel = self._channels.get(event.job_id)
            if channel is not None and event.type not in _OF_HOLDERS:
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
        """Heartbeats, events that no journal named, and jobs that are gone, for all clients."""
        while True:
            first = not self._channels
            await self._followed.wait()
            # Events between the first client's read and the start of the tail are found soon.
            await asyncio.sleep(_SOON_S if first else self._rest_s())
            try:
                if self._unjournaled is not None:
                    await self._unjournaled.look()
                await self._look_at_all()
            except Exception as error:
                self._store_is(error)
                self._beat(self._channels, time.monotonic())  # also those that it did not reach
                await asyncio.sleep(_AWAY_S)

    def _store_is(self, trouble: Exception | None) -> None:
        """Log once that the store is away and once that it is back; the reader never gives up."""
        if trouble is not None and not _is_away(trouble):
            _log.error("feed_failed", exc_info=trouble)
        elif trouble is not None and not self._away:
            self._away = True
            _log.warning("feed_store_away", error=str(trouble))
        elif trouble is None and self._away:
            self._away = False
            _log.info("feed_store_back")

    def _rest_s(self) -> float:
        """The pause between two steps of a sweep, which spreads the sweep over its interval."""
        return self._sweep_s * _SWEEP_STEP / max(len(self._channels), _SWEEP_STEP)

    async def _look_at_all(self) -> None:
        """One sweep over all followed jobs, in steps spread over the interval."""
        job_ids = list(self._channels)
        pause_s = self._rest_s()
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
            changed, unreadable = await _read_changes(self._ledger, cursors)
            for job_id, events in changed.items():
                if await self._deliver(job_id, events):
                    job_ids.append(job_id)
            for job_id in unreadable:
                self._end(job_id, _UNREADABLE)

    async def _deliver(self, job_id: str, events: list[JobEvent]) -> bool:
        masked = None
        if self._masks(job_id):
            masked = await self._redaction.events(events, patient=True)
        return self._push(job_id, events, masked)

    def _masks(self, job_id: str) -> bool:
        channel = self._channels.get(job_id)
        return channel is not None and any(each.masked for each in channel.subscribers)

    def _push(
        self, job_id: str, events: list[JobEvent], masked: list[JobEvent] | None = None
    ) -> bool:
        """Give one job's new events to its live subscribers; True if there may be more."""
        channel = self._channels.get(job_id)
        if channel is None or not events:
            return False
        now_s = time.monotonic()
        served = 0
        for event, hidden in zip(events, masked or events, strict=True):
            at = position(event.event_id)
            if at <= channel.cursor:
                continue
            channel.event_id, channel.cursor = event.event_id, at
            framed, last = {False: frame(event)}, event.type in self._final
            if self._masks(job_id):
                # Where the events are not masked, this subscriber came after they were read.
                framed[True] = frame(hidden if masked else self._redaction.event(event))
            for subscriber in channel.subscribers:
                own = framed[subscriber.masked]
                if subscriber.live and subscriber.event(event, own, at=at, last=last):
                    subscriber.pushed_s = now_s
                    served += 1
        self._on_events(served)
        return is_full(events, _CHUNK_EVENTS_MAX)

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
            self._judge(channel, record)

    def _judge(self, channel: _Channel, record: JobRecord | None) -> None:
        """End the stream of a job that is gone, or that ended without an event.

        A foreign worker writes state and event one after the other, so a job counts as ended only
        if it has looked so in two checks.
        """
        if record is None:
            gone = JobEvent(event_id="", type="expired", ts_ms=0, step="gateway.expired")
            last = unnumbered(gone) + _EXPIRED
        elif record.state in self._final and channel.looks_over:
            over = JobEvent(
                event_id="",
                type=record.state,
                ts_ms=record.updated_ms,
                step="gateway.observed",
                data=b'{"note":"the worker stored this state without an event"}',
            )
            last = unnumbered(over)
        else:
            channel.looks_over = record.state in self._final
            return
        self._end(channel.job_id, last)

    def _end(self, job_id: str, last: bytes) -> None:
        channel = self._channels.get(job_id)
        for subscriber in list(channel.subscribers) if channel else ():
            subscriber.end(last)


class _Channel:
    """The clients of one job, and the position up to which the live ones were served."""

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
        self.journaled = False  # a worker of ours holds the job: the journal names its events

    @property
    def has_live(self) -> bool:
        """Whether a client waits for the next event."""
        return any(each.live and not each.ended for each in self.subscribers)


class UnjournaledTail:
    """Reads events that no journal names: those of workers that know only the contract.

    Such a worker appends to the job's event stream and writes no journal. One blocking read over
    the streams of the followed jobs returns its events as they happen. Jobs that a worker of ours
    has claimed are left out. With many followers this reads only while the queue has workers of
    another make. `cursors` gives the jobs to read, {} if there are more than its argument.
    `hand_out` takes their events; `read` finds an unreadable stream.
    """

    def __init__(
        self,
        ledger: WaitingLedger,
        *,
        cursors: Callable[[float], dict[str, str]],
        hand_out: Callable[[str, list[JobEvent]], Awaitable[object]],
        read: Callable[[list[str]], Awaitable[None]],
    ) -> None:
        self._ledger = ledger
        self._cursors = cursors
        self._hand_out = hand_out
        self._read = read
        self._changed = asyncio.Event()
        self._waiting = False
        self._interrupting: asyncio.Task[None] | None = None
        self.foreign = False

    def add(self) -> None:
        """There are more jobs to read: wait anew, with them."""
        self._changed.set()
        if self._waiting and (self._interrupting is None or self._interrupting.done()):
            self._interrupting = asyncio.create_task(self._interrupt())

    async def look(self) -> None:
        """Ask whether there are workers of another make."""
        was, self.foreign = self.foreign, await self._ledger.has_foreign_workers()
        if self.foreign and not was:
            self.add()

    async def run(self) -> None:
        """Read for as long as the feed does."""
        while True:
            self._changed.clear()
            cursors = self._cursors(math.inf if self.foreign else _FEW_STREAMS)
            if not cursors:
                await self._changed.wait()
                await asyncio.sleep(_GATHER_S)
                continue
            self._waiting = True
            try:
                news = await self._ledger.wait_changes(cursors, wait_ms=_WAIT_MS)
            except Exception as error:
                await self._recover(error, list(cursors))
                continue
            finally:
                self._waiting = False
            for job_id, events in news.items():
                await self._hand_out(job_id, events)
            await asyncio.sleep(len(cursors) * _PAUSE_S_PER_STREAM)

    async def _recover(self, error: Exception, job_ids: list[str]) -> None:
        """After a failed wait: find the unreadable stream, and pause in any case."""
        if not _is_away(error):
            try:
                await self._read(job_ids)
            except Exception as failed:
                if not _is_away(failed):
                    _log.error("feed_failed", exc_info=failed)
        await asyncio.sleep(_AWAY_S)

    async def _interrupt(self) -> None:
        try:
            await self._ledger.interrupt()
        except Exception as error:  # the store is away: the wait has ended by itself
            if not _is_away(error):
                raise


def _is_away(error: Exception) -> bool:
    """Whether the store as a whole fails, so that waiting helps."""
    wrong_type = isinstance(error, ServerError) and str(error.reply).startswith("WRONGTYPE")
    return isinstance(error, StoreError) and not wrong_type


async def _read_changes(
    ledger: FollowLedger, cursors: Mapping[str, str]
) -> tuple[dict[str, list[JobEvent]], list[str]]:
    """New events by job, and the jobs that cannot be read, which are found by bisection.

    A key of the wrong type, written by another program, must not stop the other streams.
    """
    try:
        return await ledger.changes(cursors), []
    except Exception as error:
        if _is_away(error):
            raise
        if len(cursors) == 1:
            _log.warning("events_unreadable", job_id=next(iter(cursors)), error=str(error))
            return {}, list(cursors)
    pairs = list(cursors.items())
    left, left_bad = await _read_changes(ledger, dict(pairs[: len(pairs) // 2]))
    right, right_bad = await _read_changes(ledger, dict(pairs[len(pairs) // 2 :]))
    return left | right, left_bad + right_bad
