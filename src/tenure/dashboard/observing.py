"""Watches the journals while somebody looks: rates, durations, depths, and which jobs moved.

Nobody looking, nothing read. The first look reads back a quarter of an hour where the journal can
be entered by time. A journal that writes faster than we read is skipped to its end, and the page
says that its figures are sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import msgspec
import structlog

from tenure.core.errors import StoreError
from tenure.core.job import JobEvent
from tenure.core.journal import JournalEvent
from tenure.core.seam import Counts
from tenure.dashboard.house import House
from tenure.dashboard.timing import bucket_of

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
class Seen:
    """A worker as the journal shows it."""

    worker_id: str
    last_ms: int = 0
    started: int = 0
    finished: int = 0
    failed: int = 0


class Observer:
    """One queue under observation. `on_moved` is told of every job that changed."""

    def __init__(self, house: House, on_moved: Callable[[str, str], object]) -> None:
        self.house = house
        self.seconds: OrderedDict[int, Second] = OrderedDict()
        self.depths: deque[tuple[float, Counts]] = deque(maxlen=int(WINDOW_S / SAMPLE_S))
        self.workers: dict[str, Seen] = {}
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
        worker = self.workers.setdefault(event.worker_id, Seen(event.worker_id))
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
