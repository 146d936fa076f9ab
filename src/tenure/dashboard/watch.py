"""Figures from the journals while a page is open: rates, durations, depths; and the live stream.

Without an open page nothing is read. An observer starts 15 minutes back. If a journal grows faster
than it is read, the observer skips to its end, and the page says that its figures are sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from tenure.core.encoding import sse_frame
from tenure.core.errors import StoreError
from tenure.core.job import JobEvent
from tenure.core.journal import JournalEvent
from tenure.core.portable import State, portable_counts
from tenure.core.seam import NOW, Counts
from tenure.dashboard.queues import OpenQueue, QueueRegistry

_log = structlog.get_logger("tenure.dashboard")

WINDOW_S = 900
MOVED_MAX = 200
_STREAMS_MAX = 200
_STREAMS_PER_KEY_MAX = 20
_IDLE_S = 600.0
_SAMPLE_S = 2.0
_RATE_S = 60
_RATE_S_MIN = 5.0
_QUANTILES = (0.5, 0.95, 0.99)
_BUCKET_LOG = math.log(1.15)  # a bucket is 15 % wide, which bounds the error of a quantile

_WAIT_MS = 1_000
_UNREACHABLE_S = 1.0
_FULL_PAGE = 500
_FULL_PAGES_MAX = 40
_JOBS_MAX = 50_000
_WORKERS_MAX = 1_000
_ERRORS_MAX = 1_000
_HISTORIES_MAX = 5_000
_HISTORY_MAX = 100

_TICK_S = 0.25
_QUIET_TICK_S = 1.0
_AUTH_CHECK_S = 2.0
_RETRY_MS = 1_000

_COUNTED_AS = {
    "submit": "submitted",
    "reopen": "submitted",
    "claim": "started",
    "complete": "done",
    "bury": "failed",
    "expire": "failed",
    "retry": "retried",
    "reap": "lost",
}
_READY = frozenset({"submit", "reopen", "promote", "retry", "snooze", "release", "reap"})
_STOPPED = frozenset({"complete", "fail", "retry", "bury", "cancel", "snooze", "release", "reap"})
_NOT_IN_HISTORY = frozenset({"extend", "report", "reject", "pause", "resume"})


def bucket_of(ms: float) -> int:
    """The bucket of a duration, on a log scale."""
    return int(math.log(max(ms, 0) + 1) / _BUCKET_LOG)


def bucket_ms(bucket: int) -> float:
    """The duration in the middle of a bucket.

    >>> all(abs(bucket_ms(bucket_of(ms)) - ms) <= 0.08 * ms + 1 for ms in (1, 17, 900, 86_400_000))
    True
    """
    return math.exp((bucket + 0.5) * _BUCKET_LOG) - 1


def quantiles(
    counts: Iterable[Counter[int]], probabilities: tuple[float, ...]
) -> list[float | None]:
    """The quantiles of the durations in these buckets; None without any."""
    total: Counter[int] = Counter()
    for part in counts:
        total.update(part)
    found: list[float | None] = []
    for probability in probabilities:
        left = probability * total.total()
        value = None
        for bucket in sorted(total):
            left -= total[bucket]
            if left <= 0:
                value = bucket_ms(bucket)
                break
        found.append(value)
    return found


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


class Figures(msgspec.Struct, frozen=True):
    """Figures of the last `span_s` seconds. Durations in milliseconds, None without any."""

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
        """The share of ended jobs that failed for good."""
        ended = self.done + self.failed
        return self.failed / ended if ended else 0.0


def summarize(seconds: Iterable[Second], span_s: int) -> Figures:
    """The sum of these seconds."""
    seconds = list(seconds)
    return Figures(
        span_s,
        submitted=sum(second.submitted for second in seconds),
        started=sum(second.started for second in seconds),
        done=sum(second.done for second in seconds),
        failed=sum(second.failed for second in seconds),
        retried=sum(second.retried for second in seconds),
        lost=sum(second.lost for second in seconds),
        wait_ms=quantiles((second.wait for second in seconds), _QUANTILES),
        run_ms=quantiles((second.run for second in seconds), _QUANTILES),
    )


class Observer:
    """Reads the journal and samples the depths of one queue. Calls `on_event` per event."""

    def __init__(self, queue: OpenQueue, on_event: Callable[[str, str], object]) -> None:
        self.queue = queue
        self.seconds: OrderedDict[int, Second] = OrderedDict()
        self.depths: deque[tuple[float, Counts]] = deque(maxlen=int(WINDOW_S / _SAMPLE_S))
        self.workers: dict[str, SeenWorker] = {}
        self.errors: Counter[str] = Counter()
        self.away = ""
        self.sampled = False
        self.last_claim_ms = 0
        self.caught_up = asyncio.Event()
        self._on_event = on_event
        self._histories: OrderedDict[str, list[JobEvent]] = OrderedDict()
        self._ready_ms: OrderedDict[str, int] = OrderedDict()
        self._begun_ms: OrderedDict[str, int] = OrderedDict()
        self._versions: OrderedDict[str, int] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def counts(self) -> Counts | None:
        """The latest sample."""
        return self.depths[-1][1] if self.depths else None

    @property
    def depth_by_state(self) -> dict[State, int]:
        """The latest sample by state."""
        return portable_counts(self.queue.contract, self.counts.states if self.counts else {})

    @property
    def missing(self) -> int:
        """How many events of the last 15 minutes are missing from the journal.

        The events of a job are numbered without gaps. A missing event was trimmed before it was
        read, or was lost when the store crashed.
        """
        return sum(second.missing for second in self.window())

    def start(self) -> None:
        """Start to read; needs a running event loop."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._tail()),
                asyncio.create_task(self._sample_forever()),
            ]

    async def stop(self) -> None:
        """Stop reading; the figures stay."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def window(self, span_s: int = WINDOW_S) -> list[Second]:
        """The seconds of the last `span_s` with events, oldest first."""
        first = int(time.time()) - span_s
        return [second for at, second in self.seconds.items() if at >= first]

    def history(self, job_id: str) -> list[JobEvent]:
        """The latest journal events of a job, for contracts that keep few events with the job."""
        return list(self._histories.get(job_id, ()))

    async def sample(self) -> None:
        """Read the depths now."""
        try:
            self.depths.append((time.time(), await self.queue.ledger.counts()))
            self.away = ""
        except StoreError as error:
            self.away = str(error)

    async def _sample_forever(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(_SAMPLE_S)

    async def _tail(self) -> None:
        journal = self.queue.journal
        self.caught_up.clear()
        self._reset()  # what was counted before is read and counted again
        after, full_pages = journal.since(int((time.time() - WINDOW_S) * 1000)), 0
        while True:
            try:
                if after == NOW or self.caught_up.is_set():
                    self.caught_up.set()
                    events = await journal.wait(after=after, wait_ms=_WAIT_MS)
                elif not (events := await journal.read(after=after)):
                    self.caught_up.set()
                for event in events:
                    self._note(event)
                full_pages = full_pages + 1 if len(events) >= _FULL_PAGE else 0
                after = events[-1].seq if events else after
                if full_pages >= _FULL_PAGES_MAX:
                    after, full_pages, self.sampled = NOW, 0, True
                    self._versions.clear()
                if full_pages:
                    await asyncio.sleep(0.02)  # lets the event loop serve clients
            except StoreError as error:
                self.away = str(error)
                await asyncio.sleep(_UNREACHABLE_S)
            except Exception:
                _log.exception("observer_failed", queue=self.queue.name)
                after = NOW
                self._versions.clear()
                await asyncio.sleep(_UNREACHABLE_S)

    def _reset(self) -> None:
        memories: tuple[dict[Any, Any], ...] = (
            *(self.seconds, self.workers, self.errors, self._histories),
            *(self._ready_ms, self._begun_ms, self._versions),
        )
        for memory in memories:
            memory.clear()

    def _note(self, event: JournalEvent) -> None:
        second = self._second(event.ts_ms // 1000)
        kind, job_id = event.type, event.job_id
        counted = _COUNTED_AS.get(kind)
        if counted is not None:
            setattr(second, counted, getattr(second, counted) + 1)
        if counted == "failed":
            code = event.error_code or "unknown"
            known = code in self.errors or len(self.errors) < _ERRORS_MAX
            self.errors[code if known else "other"] += 1
        if event.ver:
            before = self._versions.get(job_id, event.ver)
            second.missing += max(0, event.ver - before - 1)
            _remember(self._versions, job_id, event.ver)
        if kind == "claim":
            self.last_claim_ms = max(self.last_claim_ms, event.ts_ms)
            ready_ms = self._ready_ms.pop(job_id, None)
            if ready_ms is not None:
                second.wait[bucket_of(event.ts_ms - ready_ms)] += 1
            _remember(self._begun_ms, job_id, event.ts_ms)
        elif kind in _STOPPED:
            begun_ms = self._begun_ms.pop(job_id, None)
            if begun_ms is not None and kind != "reap":
                second.run[bucket_of(event.ts_ms - begun_ms)] += 1
        if kind in _READY:
            _remember(self._ready_ms, job_id, max(event.ts_ms, event.due_ms))
        self._note_worker(event)
        self._note_history(event)
        self._on_event(self.queue.name, job_id)

    def _note_worker(self, event: JournalEvent) -> None:
        if not event.worker_id:
            return
        worker = self.workers.setdefault(event.worker_id, SeenWorker(event.worker_id))
        worker.last_ms = max(worker.last_ms, event.ts_ms)
        worker.started += event.type == "claim"
        worker.finished += event.type == "complete"
        worker.failed += event.type in ("fail", "bury", "retry")
        if len(self.workers) > _WORKERS_MAX:
            oldest = min(self.workers.values(), key=lambda seen: seen.last_ms)
            del self.workers[oldest.worker_id]

    def _note_history(self, event: JournalEvent) -> None:
        if not event.job_id or event.type in _NOT_IN_HISTORY:
            return
        history = self._histories.setdefault(event.job_id, [])
        self._histories.move_to_end(event.job_id)
        if len(history) < _HISTORY_MAX:
            data = msgspec.json.encode({"worker": event.worker_id, "due_ms": event.due_ms})
            history.append(
                JobEvent(event_id=event.seq, type=event.type, ts_ms=event.ts_ms, data=data)
            )
        if len(self._histories) > _HISTORIES_MAX:
            self._histories.popitem(last=False)

    def _second(self, at_s: int) -> Second:
        second = self.seconds.get(at_s)
        if second is None:
            second = self.seconds[at_s] = Second(at_s)
            while len(self.seconds) > WINDOW_S:
                self.seconds.popitem(last=False)
        return second


def _remember(memory: OrderedDict[str, int], job_id: str, value: int) -> None:
    memory[job_id] = value
    memory.move_to_end(job_id)
    if len(memory) > _JOBS_MAX:
        memory.popitem(last=False)


Row = tuple[int, int, int, int, int]
"""One second: its time, and the numbers of jobs submitted, started, done and failed."""


class JournalWatch:
    """The observers of all queues. They run until ten minutes after the last `touch`."""

    def __init__(self, queues: QueueRegistry) -> None:
        self.observers = {queue.name: Observer(queue, self._on_event) for queue in queues}
        self._listeners: set[ChangeListener] = set()
        self._touched_s = 0.0
        self._idle: asyncio.Task[None] | None = None

    def touch(self) -> None:
        """Start the observers or keep them running: a page or a program uses the figures."""
        self._touched_s = time.monotonic()
        if self._idle is None or self._idle.done():
            for observer in self.observers.values():
                observer.start()
            self._idle = asyncio.create_task(self._stop_when_idle())

    async def wait_caught_up(self, *, within_s: float) -> None:
        """Wait until the last 15 minutes have been read, at most `within_s`."""
        reading = [observer.caught_up.wait() for observer in self.observers.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.gather(*reading)

    async def sample(self) -> None:
        """Read the depths of every queue now."""
        await asyncio.gather(*(observer.sample() for observer in self.observers.values()))

    async def close(self) -> None:
        """Stop all observers."""
        if self._idle is not None:
            self._idle.cancel()
            await asyncio.gather(self._idle, return_exceptions=True)
        await self._stop()

    def figures(self, queue: str = "", *, span_s: int = 300) -> Figures:
        """The figures of one queue, or of all together."""
        return summarize([s for o in self._chosen(queue) for s in o.window(span_s)], span_s)

    def rate(self, queue: str = "") -> float:
        """Jobs done per second in the last minute, or since the first event if that is less."""
        seconds = [s for o in self._chosen(queue) for s in o.window()]
        now_s = time.time()
        first_s = min((s.at_s for s in seconds), default=now_s)
        span_s = min(_RATE_S, max(_RATE_S_MIN, now_s - first_s))
        return sum(s.done for s in seconds if s.at_s >= now_s - span_s) / span_s

    def series(self, queue: str = "", *, span_s: int = WINDOW_S) -> list[Row]:
        """One row per second, without the current one."""
        now = int(time.time())
        rows = {at: [at, 0, 0, 0, 0] for at in range(now - span_s, now)}
        for observer in self._chosen(queue):
            for second in observer.window(span_s):
                row = rows.get(second.at_s)
                if row is not None:
                    row[1] += second.submitted
                    row[2] += second.started
                    row[3] += second.done
                    row[4] += second.failed
        return [(at, row[1], row[2], row[3], row[4]) for at, row in rows.items()]

    def listen(self) -> ChangeListener:
        """A new listener; call `leave` at the end."""
        listener = ChangeListener()
        self._listeners.add(listener)
        return listener

    def leave(self, listener: ChangeListener) -> None:
        """Remove a listener."""
        self._listeners.discard(listener)

    def _chosen(self, queue: str) -> list[Observer]:
        return [self.observers[queue]] if queue else list(self.observers.values())

    def _on_event(self, queue: str, job_id: str) -> None:
        for listener in self._listeners:
            listener.add(queue, job_id)

    async def _stop(self) -> None:
        await asyncio.gather(*(observer.stop() for observer in self.observers.values()))

    async def _stop_when_idle(self) -> None:
        while True:
            idle_s = time.monotonic() - self._touched_s
            if idle_s >= _IDLE_S and not self._listeners:
                break
            await asyncio.sleep(max(5.0, _IDLE_S - idle_s))
        await self._stop()


class ChangeListener:
    """Collects the changes since the last `take`: the number of events, and up to 200 jobs."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self._moved: dict[tuple[str, str], None] = {}
        self._count = 0

    def add(self, queue: str, job_id: str) -> None:
        """Add an event of a job."""
        self._count += 1
        if len(self._moved) < MOVED_MAX:
            self._moved[(queue, job_id)] = None
        self.event.set()

    def take(self) -> tuple[int, list[tuple[str, str]]]:
        """The number of events and their jobs since the last call."""
        taken = self._count, list(self._moved)
        self._count, self._moved = 0, {}
        self.event.clear()
        return taken


class Series(msgspec.Struct, frozen=True):
    """The first frame: every second of the last 15 minutes."""

    rows: list[Row]


class Tick(msgspec.Struct, frozen=True):
    """The changes since the last tick: number of events, jobs (queue and id), new seconds."""

    events: int
    moved: list[tuple[str, str]]
    rows: list[Row]
    now_ms: int


class LiveStreams:
    """The event streams of open pages: which jobs changed, at most four times a second.

    They carry no payload: a page fetches itself again.
    """

    def __init__(self, watch: JournalWatch) -> None:
        self._watch = watch
        self._open: set[asyncio.Event] = set()
        self._by_key: Counter[str] = Counter()
        self._draining = False

    def drain(self) -> None:
        """End all streams; the browsers reconnect to the next gateway."""
        self._draining = True
        for over in self._open:
            over.set()

    @property
    def is_full(self) -> bool:
        """Whether no further stream is accepted."""
        return self._draining or len(self._open) >= _STREAMS_MAX

    def is_full_of(self, who: str) -> bool:
        """Whether a key has all the streams that it may have; a local caller has no limit."""
        return bool(who) and self._by_key[who] >= _STREAMS_PER_KEY_MAX

    async def frames(
        self, queue: str, is_still_valid: Callable[[], Awaitable[bool]], *, who: str = ""
    ) -> AsyncIterator[bytes]:
        """The frames of one page, until its user signs out or the gateway shuts down."""
        over = asyncio.Event()
        self._open.add(over)
        self._by_key[who] += 1
        listener = self._watch.listen()
        watching = asyncio.create_task(_until_signed_out(is_still_valid, over))
        try:
            series = self._watch.series(queue)
            sent_s = series[-1][0] if series else 0
            yield sse_frame("series", Series(series), retry_ms=_RETRY_MS)
            while not over.is_set():
                await _wait_any(_QUIET_TICK_S, listener.event, over)
                self._watch.touch()
                count, moved = listener.take()
                rows = [row for row in self._watch.series(queue, span_s=5) if row[0] > sent_s]
                sent_s = rows[-1][0] if rows else sent_s
                yield sse_frame("tick", Tick(count, moved, rows, int(time.time() * 1e3)))
                await _wait_any(_TICK_S, over)
        finally:
            watching.cancel()
            self._watch.leave(listener)
            self._open.discard(over)
            self._by_key[who] -= 1
            if not self._by_key[who]:
                del self._by_key[who]


async def _wait_any(timeout_s: float, *events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _until_signed_out(
    is_still_valid: Callable[[], Awaitable[bool]], over: asyncio.Event
) -> None:
    while not over.is_set():
        await asyncio.sleep(_AUTH_CHECK_S)
        with contextlib.suppress(StoreError):  # unknown while the store does not answer
            if not await is_still_valid():
                over.set()
