"""The one reader of a gateway process: it serves the events of all jobs to all clients.

It tails the queue's journal, which names every job that moved, and reads the new events of those
that somebody follows in one multiplexed call. Workers of other makes write events but no journal:
`unjournaled` waits for theirs. About once a second a round over all followed jobs finds what both
have missed, sends heartbeats and notices jobs that have expired. Without clients it reads nothing.

Nobody misses an event: a job's channel has one position, a client joins it only when its own
position has reached the channel's, and everyone drops what lies at or before their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import structlog

from tenure.core.event import JournalEvent
from tenure.core.job import JobEvent, JobRecord
from tenure.core.redacting import Redaction
from tenure.core.seam import Journal, is_full
from tenure.gateway.frames import HEARTBEAT, comment, frame, position, unnumbered
from tenure.gateway.reading import FollowLedger, is_away, read_changes
from tenure.gateway.subscriber import Subscriber, deliver
from tenure.gateway.unjournaled import UnjournaledTail, WaitingLedger

_log = structlog.get_logger("tenure.gateway")

NOW = "$"
_PAGE = 500
_CHUNK = 500
# How many jobs the round looks at in one go. An event that comes meanwhile waits for that long.
_STEP = 50
_WAIT_MS = 2_000
_AWAY_S = 0.5
_SOON_S = 0.05
# So many rich pages of the journal in a row mean that reading it costs more than it tells: skip to
# its end, look at all followed jobs instead, and leave the time of some pages to the clients.
_RICH_PAGE = 100
_RICH_PAGES_MAX = 20
_REST_S = 0.1
_OF_HOLDERS = frozenset({"extend", "report", "reject"})
_EXPIRED = comment("the job has expired")
_UNREADABLE = comment("the events of this job cannot be read")


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
        self.journaled = False  # a worker of ours holds the job, so that the journal names its news

    @property
    def has_live(self) -> bool:
        """Whether somebody waits for the next event."""
        return any(each.live and not each.ended for each in self.subscribers)


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
                ledger, cursors=self._unclaimed, hand_out=self._masked_out, read=self._read
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
        """Hand over one page of what lies before the channel's position, then join the channel.

        Between the last read and `live` nothing is awaited, so no event can slip through.
        """
        try:
            events = await self._ledger.events(
                subscriber.job_id, after=subscriber.event_id, limit=subscriber.page
            )
        except Exception as error:
            if not is_away(error):
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
            served += deliver(subscriber, event, self._final)
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
        """Follow the journal while somebody follows a job."""
        after, rich_pages = NOW, 0
        while True:
            if not self._channels:
                after = NOW
                await self._followed.wait()
            try:
                events = await self._journal.wait(after=after, wait_ms=_WAIT_MS)
                if events:
                    after = events[-1].seq
                    rich_pages = rich_pages + 1 if len(events) >= _RICH_PAGE else 0
                    self._note_holders(events)
                    await self._read({event.job_id for event in events} & self._channels.keys())
                if rich_pages >= _RICH_PAGES_MAX:
                    after, rich_pages = NOW, 0
                    await asyncio.sleep(_REST_S)
                    await self._read(self._channels)
                self._store_is(None)
            except Exception as error:
                self._store_is(error)
                after = NOW
                await asyncio.sleep(_AWAY_S)

    def _note_holders(self, events: Iterable[JournalEvent]) -> None:
        let_go = False
        for event in events:
            channel = self._channels.get(event.job_id)
            if channel is not None and event.type not in _OF_HOLDERS:
                was, channel.journaled = channel.journaled, event.type == "claim"
                let_go |= was and not channel.journaled
        if let_go and self._unjournaled is not None:
            self._unjournaled.add()  # the next holder may be a worker that writes no journal

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
        """Look after everyone: heartbeats, events that no journal named, jobs that are gone."""
        while True:
            first = not self._channels
            await self._followed.wait()
            # What happened between the first client's reading and our tailing is found soon.
            await asyncio.sleep(_SOON_S if first else self._rest_s())
            try:
                if self._unjournaled is not None:
                    await self._unjournaled.look()
                await self._look_at_all()
            except Exception as error:
                self._store_is(error)
                self._beat(self._channels, time.monotonic())  # also of those it did not get to
                await asyncio.sleep(_AWAY_S)

    def _store_is(self, trouble: Exception | None) -> None:
        """Say once that the store has gone and once that it is back; the reader never gives up."""
        if trouble is not None and not is_away(trouble):
            _log.error("feed_failed", exc_info=trouble)
        elif trouble is not None and not self._away:
            self._away = True
            _log.warning("feed_store_away", error=str(trouble))
        elif trouble is None and self._away:
            self._away = False
            _log.info("feed_store_back")

    def _rest_s(self) -> float:
        """A round takes its own share of the time between two; the last step's rest is this."""
        return self._sweep_s * _STEP / max(len(self._channels), _STEP)

    async def _look_at_all(self) -> None:
        """One round over all followed jobs, in steps spread over the time between two rounds."""
        job_ids = list(self._channels)
        pause_s = self._rest_s()
        for start in range(0, len(job_ids), _STEP):
            step = job_ids[start : start + _STEP]
            self._beat(step, time.monotonic())
            await self._read(step)
            await self._check(step, time.monotonic())
            if start + _STEP < len(job_ids):
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
            changed, unreadable = await read_changes(self._ledger, cursors)
            for job_id, events in changed.items():
                if await self._masked_out(job_id, events):
                    job_ids.append(job_id)
            for job_id in unreadable:
                self._end(job_id, _UNREADABLE)

    async def _masked_out(self, job_id: str, events: list[JobEvent]) -> bool:
        masked = None
        if self._masks(job_id):
            masked = await self._redaction.events(events, patient=True)
        return self._hand_out(job_id, events, masked)

    def _masks(self, job_id: str) -> bool:
        channel = self._channels.get(job_id)
        return channel is not None and any(each.masked for each in channel.subscribers)

    def _hand_out(
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
        return is_full(events, 1000)

    async def _check(self, job_ids: list[str], now_s: float) -> None:
        """Now and then ask whether a quiet job still exists, and whether it is over."""
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
        """End the stream of a job that is gone, or that ended without saying so.

        A foreign worker writes state and event one after the other: only what still looks over at
        the next round is.
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
