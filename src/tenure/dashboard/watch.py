"""Reads journals while a page is open: rates, durations, depths, and the pages' event stream."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import msgspec
import structlog
from starlette.types import Receive, Send

from tenure.core.errors import StoreError
from tenure.core.event import JournalEvent
from tenure.core.job import JobEvent
from tenure.core.seam import Counts
from tenure.dashboard.queues import QueueRegistry, ServedQueue

_BASE = math.log(1.15)  # a bucket is 15 % wide, which bounds the error of a quantile
BANDS_MS = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)


def bucket_of(ms: float) -> int:
    """The bucket of a duration."""
    return int(math.log(max(ms, 0) + 1) / _BASE)


def bucket_ms(bucket: int) -> float:
    """The duration in the middle of a bucket.

    >>> all(abs(bucket_ms(bucket_of(ms)) - ms) <= 0.08 * ms + 1 for ms in (1, 17, 900, 86_400_000))
    True
    """
    return math.exp((bucket + 0.5) * _BASE) - 1


def quantiles(counts: Iterable[Counter[int]], shares: tuple[float, ...]) -> list[float | None]:
    """The durations below which these shares lie; None where nothing was gathered."""
    total: Counter[int] = Counter()
    for part in counts:
        total.update(part)
    size = sum(total.values())
    if not size:
        return [None] * len(shares)
    found: list[float | None] = []
    for share in shares:
        left = share * size
        for bucket in sorted(total):
            left -= total[bucket]
            if left <= 0:
                found.append(bucket_ms(bucket))
                break
    return found


def band_of(bucket: int) -> int:
    """The row of the heat map in which a bucket lies."""
    ms = bucket_ms(bucket)
    return sum(ms > bound for bound in BANDS_MS)


_log = structlog.get_logger("tenure.dashboard")

WINDOW_S = 900
SAMPLE_S = 2.0
IDLE_S = 600.0
_JOBS_MAX = 50_000
_WAIT_MS = 1_000
_AWAY_S = 1.0
_RICH_PAGE = 500
_RICH_PAGES_MAX = 40
_NOW = "$"
_STORIES_MAX = 5_000
_STEPS_MAX = 100
_SMALL_TALK = frozenset({"extend", "report", "reject", "pause", "resume"})

_SUBMITTED = frozenset({"submit", "reopen"})
_READY = frozenset({"submit", "reopen", "promote", "retry", "snooze", "release", "reap"})
_STOPPED = frozenset({"complete", "fail", "retry", "bury", "cancel", "snooze", "release", "reap"})


@runtime_checkable
class Seekable(Protocol):
    """A journal that can be entered by time."""

    def since(self, ts_ms: int) -> str:
        """The position after which everything that happened since then lies."""


@dataclass(slots=True)
class Second:
    """What happened within one second."""

    at_s: int
    submitted: int = 0
    started: int = 0
    done: int = 0
    failed: int = 0
    retried: int = 0
    lost: int = 0
    missing: int = 0
    wait: Counter[int] = field(default_factory=Counter)
    run: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class SeenWorker:
    """A worker as the journal shows it."""

    worker_id: str
    last_ms: int = 0
    started: int = 0
    finished: int = 0
    failed: int = 0


class Observer:
    """One queue under observation. `on_moved` is told of every job that changed."""

    def __init__(self, house: ServedQueue, on_moved: Callable[[str, str], object]) -> None:
        self.house = house
        self.seconds: OrderedDict[int, Second] = OrderedDict()
        self.depths: deque[tuple[float, Counts]] = deque(maxlen=int(WINDOW_S / SAMPLE_S))
        self.workers: dict[str, SeenWorker] = {}
        self.errors: Counter[str] = Counter()
        self.away = ""
        self.sampled = False
        self.last_claim_ms = 0
        self.caught_up = asyncio.Event()
        self._on_moved = on_moved
        self._stories: OrderedDict[str, list[JobEvent]] = OrderedDict()
        self._ready_ms: OrderedDict[str, int] = OrderedDict()
        self._begun_ms: OrderedDict[str, int] = OrderedDict()
        self._vers: OrderedDict[str, int] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def running(self) -> bool:
        """Whether it watches now."""
        return bool(self._tasks)

    @property
    def counts(self) -> Counts | None:
        """The latest sample."""
        return self.depths[-1][1] if self.depths else None

    def start(self) -> None:
        """Begin to watch; needs the running loop."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._tail()), asyncio.create_task(self._sample())]

    async def stop(self) -> None:
        """Stop watching; what was seen stays."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def window(self, span_s: int = WINDOW_S) -> list[Second]:
        """The seconds of the last `span_s` in which something happened, oldest first."""
        first = int(time.time()) - span_s
        return [second for at, second in self.seconds.items() if at >= first]

    async def look(self) -> None:
        """Take one sample of the depths now."""
        try:
            self.depths.append((time.time(), await self.house.ledger.counts()))
            self.away = ""
        except StoreError as error:
            self.away = str(error)

    async def _sample(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(SAMPLE_S)

    async def _tail(self) -> None:
        journal = self.house.journal
        after, rich = _NOW, 0
        self.caught_up.clear()
        if isinstance(journal, Seekable):
            self._forget()  # what was counted before is read, and counted, again
            after = journal.since(int((time.time() - WINDOW_S) * 1000))
        while True:
            try:
                if after == _NOW or self.caught_up.is_set():
                    self.caught_up.set()
                    events = await journal.wait(after=after, wait_ms=_WAIT_MS)
                elif not (events := await journal.read(after=after)):
                    self.caught_up.set()
                for event in events:
                    self._note(event)
                rich = rich + 1 if len(events) >= _RICH_PAGE else 0
                after = events[-1].seq if events else after
                if rich >= _RICH_PAGES_MAX:
                    after, rich, self.sampled = _NOW, 0, True
                    self._vers.clear()
                if rich:
                    await asyncio.sleep(0.02)  # leave the loop to the clients of the gateway
            except StoreError as error:
                self.away = str(error)
                await asyncio.sleep(_AWAY_S)
            except Exception:
                _log.exception("observer_failed", queue=self.house.name)
                after = _NOW
                self._vers.clear()
                await asyncio.sleep(_AWAY_S)

    def _forget(self) -> None:
        for memory in (self.seconds, self.workers, self.errors, self._stories):
            memory.clear()
        for times in (self._ready_ms, self._begun_ms, self._vers):
            times.clear()

    def _note(self, event: JournalEvent) -> None:
        second = self._second(event.ts_ms // 1000)
        kind = event.type
        self._count(second, event)
        self._follow(second, event)
        if kind == "claim":
            self._claimed(second, event)
        elif kind in _STOPPED:
            self._stopped(second, event)
        if kind in _READY:
            _remember(self._ready_ms, event.job_id, max(event.ts_ms, event.due_ms))
        if event.worker_id:
            self._seen(event)
        if event.job_id and kind not in _SMALL_TALK:
            self._tell(event)
        self._on_moved(self.house.name, event.job_id)

    @property
    def missing(self) -> int:
        """Steps of the last quarter of an hour that the journal does not hold.

        The steps of a job are numbered without a hole, so a number that was left out was trimmed
        before it was read, or went with a store that lost its end.
        """
        return sum(second.missing for second in self.window())

    def _follow(self, second: Second, event: JournalEvent) -> None:
        before = self._vers.get(event.job_id)
        if not event.ver:
            return
        if before is not None and event.ver > before + 1:
            second.missing += event.ver - before - 1
        _remember(self._vers, event.job_id, event.ver)

    def story(self, job_id: str) -> list[JobEvent]:
        """What the journal said of a job lately, for contracts that keep less with the job."""
        return list(self._stories.get(job_id, ()))

    def _tell(self, event: JournalEvent) -> None:
        story = self._stories.setdefault(event.job_id, [])
        self._stories.move_to_end(event.job_id)
        if len(story) < _STEPS_MAX:
            data = msgspec.json.encode({"worker": event.worker_id, "due_ms": event.due_ms})
            story.append(
                JobEvent(event_id=event.seq, type=event.type, ts_ms=event.ts_ms, data=data)
            )
        if len(self._stories) > _STORIES_MAX:
            self._stories.popitem(last=False)

    def _count(self, second: Second, event: JournalEvent) -> None:
        match event.type:
            case "submit" | "reopen":
                second.submitted += 1
            case "complete":
                second.done += 1
            case "bury" | "expire":
                second.failed += 1
                self.errors[event.error_code or "unknown"] += 1
            case "retry":
                second.retried += 1
            case "reap":
                second.lost += 1

    def _claimed(self, second: Second, event: JournalEvent) -> None:
        second.started += 1
        self.last_claim_ms = max(self.last_claim_ms, event.ts_ms)
        ready_ms = self._ready_ms.pop(event.job_id, None)
        if ready_ms is not None:
            second.wait[bucket_of(event.ts_ms - ready_ms)] += 1
        _remember(self._begun_ms, event.job_id, event.ts_ms)

    def _stopped(self, second: Second, event: JournalEvent) -> None:
        begun_ms = self._begun_ms.pop(event.job_id, None)
        if begun_ms is not None and event.type != "reap":
            second.run[bucket_of(event.ts_ms - begun_ms)] += 1

    def _seen(self, event: JournalEvent) -> None:
        worker = self.workers.setdefault(event.worker_id, SeenWorker(event.worker_id))
        worker.last_ms = max(worker.last_ms, event.ts_ms)
        worker.started += event.type == "claim"
        worker.finished += event.type == "complete"
        worker.failed += event.type in ("fail", "bury", "retry")
        if len(self.workers) > 1_000:  # a fleet that restarts often must not grow it for ever
            oldest = min(self.workers.values(), key=lambda seen: seen.last_ms)
            del self.workers[oldest.worker_id]

    def _second(self, at_s: int) -> Second:
        second = self.seconds.get(at_s)
        if second is None:
            second = self.seconds[at_s] = Second(at_s)
            while len(self.seconds) > WINDOW_S:
                self.seconds.popitem(last=False)
        return second


def _remember(memory: OrderedDict[str, int], job_id: str, ts_ms: int) -> None:
    memory[job_id] = ts_ms
    memory.move_to_end(job_id)
    if len(memory) > _JOBS_MAX:
        memory.popitem(last=False)


MOVED_MAX = 200
_RATE_S = 60
_RATE_S_MIN = 5.0
_SHARES = (0.5, 0.95, 0.99)


class Figures(msgspec.Struct, frozen=True):
    """What the last `span_s` seconds were like. Durations in milliseconds, None without any."""

    span_s: int
    submitted: int
    started: int
    done: int
    failed: int
    retried: int
    lost: int
    wait_ms: list[float | None]
    run_ms: list[float | None]

    @property
    def failed_share(self) -> float:
        """Of what ended, how much failed for good."""
        ended = self.done + self.failed
        return self.failed / ended if ended else 0.0


class Watch:
    """Owns the observers. `touch` says that somebody looks."""

    def __init__(self, street: QueueRegistry) -> None:
        self.observers = {house.name: Observer(house, self._moved) for house in street}
        self._listeners: set[Listener] = set()
        self._looked_s = 0.0
        self._idle: asyncio.Task[None] | None = None

    def touch(self) -> None:
        """Somebody looks: watch from now on, until ten minutes after the last look."""
        self._looked_s = time.monotonic()
        if self._idle is None or self._idle.done():
            for observer in self.observers.values():
                observer.start()
            self._idle = asyncio.create_task(self._until_idle())

    async def caught_up(self, *, within_s: float) -> None:
        """Until the last quarter of an hour has been read, or for so long."""
        reading = [observer.caught_up.wait() for observer in self.observers.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.gather(*reading)

    async def look(self) -> None:
        """Take a sample of every queue now."""
        await asyncio.gather(*(observer.look() for observer in self.observers.values()))

    def listen(self) -> Listener:
        """Hear of what moves; `leave` afterwards."""
        listener = Listener()
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        """Stop hearing."""
        self._listeners.discard(listener)

    async def close(self) -> None:
        """Stop all observers."""
        if self._idle is not None:
            self._idle.cancel()
            await asyncio.gather(self._idle, return_exceptions=True)
        await asyncio.gather(*(observer.stop() for observer in self.observers.values()))

    def figures(self, queue: str = "", *, span_s: int = 300) -> Figures:
        """One queue's figures, or those of all together."""
        chosen = [self.observers[queue]] if queue else list(self.observers.values())
        return figures([s for observer in chosen for s in observer.window(span_s)], span_s)

    def rate(self, queue: str = "") -> float:
        """Jobs done a second over the last minute, or since the first was seen if that is less."""
        chosen = [self.observers[queue]] if queue else list(self.observers.values())
        now_s = time.time()
        first_s = min((s.at_s for o in chosen for s in o.window()), default=now_s)
        span_s = min(_RATE_S, max(_RATE_S_MIN, now_s - first_s))
        done = sum(s.done for o in chosen for s in o.window(_RATE_S) if s.at_s >= now_s - span_s)
        return done / span_s

    def series(
        self, queue: str = "", *, span_s: int = WINDOW_S
    ) -> list[tuple[int, int, int, int, int]]:
        """Per second: time, submitted, started, done, failed; the current second is left out."""
        now = int(time.time())
        chosen = [self.observers[queue]] if queue else list(self.observers.values())
        rows = {at: [at, 0, 0, 0, 0] for at in range(now - span_s, now)}
        for observer in chosen:
            for second in observer.window(span_s):
                row = rows.get(second.at_s)
                if row is not None:
                    row[1] += second.submitted
                    row[2] += second.started
                    row[3] += second.done
                    row[4] += second.failed
        return [(at, row[1], row[2], row[3], row[4]) for at, row in rows.items()]

    def _moved(self, queue: str, job_id: str) -> None:
        for listener in self._listeners:
            listener.hear(queue, job_id)

    async def _until_idle(self) -> None:
        while True:
            idle_s = time.monotonic() - self._looked_s
            if idle_s >= IDLE_S and not self._listeners:
                break
            await asyncio.sleep(max(5.0, IDLE_S - idle_s))
        await asyncio.gather(*(observer.stop() for observer in self.observers.values()))


class Listener:
    """What moved since the last time somebody asked. Bounded: past that only the number counts."""

    def __init__(self) -> None:
        self.moved: dict[tuple[str, str], None] = {}
        self.count = 0
        self.event = asyncio.Event()

    def hear(self, queue: str, job_id: str) -> None:
        """A job moved."""
        self.count += 1
        if len(self.moved) < MOVED_MAX:
            self.moved[(queue, job_id)] = None
        self.event.set()

    def take(self) -> tuple[int, list[tuple[str, str]]]:
        """How many events there were, and of which jobs; begins anew."""
        taken = self.count, list(self.moved)
        self.count, self.moved = 0, {}
        self.event.clear()
        return taken


def figures(seconds: Iterable[Second], span_s: int) -> Figures:
    """Sum seconds up."""
    seconds = list(seconds)
    total: Counter[str] = Counter()
    for second in seconds:
        for name in ("submitted", "started", "done", "failed", "retried", "lost"):
            total[name] += getattr(second, name)
    return Figures(
        span_s=span_s,
        submitted=total["submitted"],
        started=total["started"],
        done=total["done"],
        failed=total["failed"],
        retried=total["retried"],
        lost=total["lost"],
        wait_ms=quantiles((second.wait for second in seconds), _SHARES),
        run_ms=quantiles((second.run for second in seconds), _SHARES),
    )


HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
]
_BEAT_S = 0.25
_QUIET_S = 1.0
_CHECK_S = 2.0
_RETRY_MS = 1_000
STREAMS_MAX = 200


Row = tuple[int, int, int, int, int]
"""A second: its time, and how many jobs were submitted, started, done and failed in it."""


class Series(msgspec.Struct, frozen=True):
    """The first frame: every second of the last quarter of an hour."""

    rows: list[Row]


class Tick(msgspec.Struct, frozen=True):
    """What happened since the last one: how many events, of which jobs (queue and id), seconds."""

    events: int
    moved: list[tuple[str, str]]
    rows: list[Row]
    now_ms: int


class Live:
    """Serves the stream, and ends all of them when the gateway goes."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._open: set[asyncio.Event] = set()
        self._draining = False

    def drain(self) -> None:
        """Send everyone away; their browsers come back to whoever answers next."""
        self._draining = True
        for over in self._open:
            over.set()

    @property
    def is_full(self) -> bool:
        """Whether one more would be too many."""
        return self._draining or len(self._open) >= STREAMS_MAX

    async def serve(
        self,
        queue: str,
        receive: Receive,
        send: Send,
        is_still_in: Callable[[], Awaitable[bool]],
    ) -> None:
        """Write the stream until the page is closed, its reader signs out or the gateway goes."""
        over = asyncio.Event()
        self._open.add(over)
        listener = self._watch.listen()
        ends = [_until_gone(receive, over), _until_out(is_still_in, over)]
        waiting = [asyncio.create_task(end) for end in ends]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await self._write(queue, listener, over, send)
            await send({"type": "http.response.body"})
        finally:
            for wait in waiting:
                wait.cancel()
            self._watch.leave(listener)
            self._open.discard(over)

    async def _write(self, queue: str, listener: Listener, over: asyncio.Event, send: Send) -> None:
        series = self._watch.series(queue)
        sent_s = series[-1][0] if series else 0
        first = b"retry: %d\n" % _RETRY_MS + _frame("series", Series(series))
        await send({"type": "http.response.body", "body": first, "more_body": True})
        while not over.is_set():
            await _either(listener.event, over, _QUIET_S)
            self._watch.touch()
            count, moved = listener.take()
            rows = [row for row in self._watch.series(queue, span_s=5) if row[0] > sent_s]
            sent_s = rows[-1][0] if rows else sent_s
            tick = Tick(count, moved, rows, int(time.time() * 1e3))
            frame = _frame("tick", tick)
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            await _either(None, over, _BEAT_S)


def _frame(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


async def _either(event: asyncio.Event | None, over: asyncio.Event, most_s: float) -> None:
    """Wait for news, for the end, or for the time."""
    waits = [asyncio.create_task(each.wait()) for each in (event, over) if each is not None]
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _until_out(is_still_in: Callable[[], Awaitable[bool]], over: asyncio.Event) -> None:
    while not over.is_set():
        await asyncio.sleep(_CHECK_S)
        with contextlib.suppress(StoreError):  # a store that is away says nothing of a session
            if not await is_still_in():
                over.set()


async def _until_gone(receive: Receive, over: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    over.set()
