"""All observers of a gateway, awake while somebody looks; and the pulse that pages listen to."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterable

import msgspec

from tenure.dashboard.house import Street
from tenure.dashboard.observing import IDLE_S, WINDOW_S, Observer, Second
from tenure.dashboard.timing import quantiles

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

    def __init__(self, street: Street) -> None:
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
