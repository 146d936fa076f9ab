"""What a worker counts and tells: metrics, listeners, the watchdog of the service manager."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import msgspec
import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tenure.core.encoding import from_json
from tenure.core.errors import UsageError
from tenure.core.outcome import Buried, Cancelled, Completed, Outcome, Retried, Verdict

_WAIT_S = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 1800.0, 3600.0)
_RUN_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 1800.0)

_COUNTERS = (
    ("jobs_started", "attempts begun", "started"),
    ("jobs_retried", "attempts sent back", "retried"),
    ("lease_lost", "leases lost while held", "lost"),
)
_HISTOGRAMS = (
    ("job_wait_seconds", "from submit to first start", "wait"),
    ("job_run_seconds", "from start to outcome", "run"),
)


class Buckets:
    """A histogram: how many values fell at or below each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """The cumulative counts by bound, as Prometheus has them."""
        seen, rows = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            rows.append((bound, float(seen)))
        return rows


class Tally:
    """The counters of one task of one queue."""

    __slots__ = ("finished", "lost", "queue", "retried", "run", "started", "task", "wait")

    def __init__(self, queue: str, task: str) -> None:
        self.queue = queue
        self.task = task
        self.started = 0
        self.retried = 0
        self.lost = 0
        self.finished: dict[str, int] = {}
        self.wait = Buckets(_WAIT_S)
        self.run = Buckets(_RUN_S)


class Metrics(Collector):
    """All tallies of a worker, and by queue how many records were set aside as unreadable.

    Registers itself in `registry`.
    """

    def __init__(self, registry: CollectorRegistry, slots: Callable[[], tuple[int, int]]) -> None:
        self._tallies: dict[tuple[str, str], Tally] = {}
        self.quarantined: dict[str, int] = {}
        self._slots = slots
        self._registry = registry
        registry.register(self)

    def tally(self, queue: str, task: str) -> Tally:
        """The tally of a task of a queue, made on first use."""
        key = (queue, task)
        found = self._tallies.get(key)
        if found is None:
            found = self._tallies[key] = Tally(queue, task)
        return found

    def close(self) -> None:
        """Leave the registry, so that another worker may use it."""
        self._registry.unregister(self)

    def collect(self) -> Iterator[Metric]:
        """Called by Prometheus, in any thread."""
        tallies = list(self._tallies.copy().values())
        used, total = self._slots()
        for name, about, value in _COUNTERS:
            rows = [((each.queue, each.task), getattr(each, value)) for each in tallies]
            yield _counter(name, about, ("queue", "task"), rows)
        finished = [
            ((each.queue, each.task, outcome), count)
            for each in tallies
            for outcome, count in each.finished.copy().items()
        ]
        labels = ("queue", "task", "outcome")
        yield _counter("jobs_finished", "attempts by outcome", labels, finished)
        about = "records that could not be read and were set aside"
        quarantined = [((queue,), count) for queue, count in self.quarantined.copy().items()]
        yield _counter("quarantined", about, ("queue",), quarantined)
        for name, about, value in _HISTOGRAMS:
            family = HistogramMetricFamily(f"tenure_{name}", about, labels=("queue", "task"))
            for each in tallies:
                buckets: Buckets = getattr(each, value)
                family.add_metric((each.queue, each.task), buckets.cumulative(), buckets.total)
            yield family
        yield GaugeMetricFamily("tenure_slots_used", "slots in use", value=used)
        yield GaugeMetricFamily("tenure_slots", "slots there are", value=total)

    def describe(self) -> Iterator[Metric]:
        """Empty, so that registering does not collect."""
        return iter(())


def _counter(
    name: str, about: str, labels: tuple[str, ...], rows: Sequence[tuple[tuple[str, ...], int]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"tenure_{name}", about, labels=labels)
    for values, count in rows:
        family.add_metric(values, count)
    return family


log = structlog.get_logger("tenure.worker")

Hook = Callable[[str, int], None]

_ACTIVITY = ("claimed", "settled", "lost")


class Watch:
    """Counts events by name, so that tests wait for one instead of sleeping; not thread-safe.

    The names: contact, ready, claimed, claim_failed, claim_empty, started, ended, abandoned,
    reported, report_failed, settled, settle_failed, extended, extend_failed, lost, upkeep,
    draining, releasing, drained, stopped. `activity` is a number that grows whenever jobs come or
    go.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.hooks: list[Hook] = []
        self.activity = 0
        self._active = asyncio.Event()
        self._waiters: list[tuple[str, int, asyncio.Future[None]]] = []

    def tell(self, name: str, count: int = 1) -> None:
        """Count `count` events of this name."""
        self.counts[name] += count
        if name in _ACTIVITY:
            self.activity += count
            self._active.set()
        if self._waiters:
            self._wake(name)
        for hook in self.hooks:
            hook(name, count)

    async def next_activity(self, *, timeout_s: float) -> None:
        """Return at the next activity, or after `timeout_s`."""
        self._active.clear()
        alarm = asyncio.get_running_loop().call_later(timeout_s, self._active.set)
        try:
            await self._active.wait()
        finally:
            alarm.cancel()

    async def until(self, name: str, count: int = 1, *, timeout_s: float = 10) -> None:
        """Return as soon as `name` has happened `count` times since the worker was made."""
        if self.counts[name] >= count:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append((name, count, waiter))
        try:
            await asyncio.wait_for(waiter, timeout_s)
        except TimeoutError:
            seen = dict(self.counts)
            raise TimeoutError(f"no {count} x {name!r} within {timeout_s} s; {seen=}") from None

    def _wake(self, name: str) -> None:
        seen = self.counts[name]
        for waited, count, waiter in self._waiters:
            if waited == name and seen >= count and not waiter.done():
                waiter.set_result(None)
        self._waiters = [entry for entry in self._waiters if not entry[2].done()]


EventName = Literal[
    "ready", "active", "completed", "failed", "cancelled", "drained", "paused", "resumed", "closed"
]
"""active(job): its handler starts. completed(job, result), failed(job, failure), cancelled(job):
the store has accepted the outcome; a failed job may be tried again. drained(): claims find no jobs.
ready(), paused(), resumed(), closed(): the worker."""

Listener = Callable[..., Any]


class Listeners:
    """The application's functions by event; called in the worker's loop."""

    def __init__(self) -> None:
        self._by_event: dict[str, list[Listener]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def __bool__(self) -> bool:
        return bool(self._by_event)

    def add(self, event: EventName, listener: Listener) -> None:
        """Call `listener` with the arguments of the event; errors are logged."""
        if event not in get_args(EventName):
            raise UsageError(f"a worker has no event {event!r}; {', '.join(get_args(EventName))}")
        self._by_event.setdefault(event, []).append(listener)

    def tell(self, event: EventName, *what: Any) -> None:
        """Call the listeners of an event."""
        for listener in self._by_event.get(event, ()):
            try:
                answer = listener(*what)
            except Exception:
                log.exception("a listener failed", worker_event=event)
                continue
            if inspect.isawaitable(answer):
                task = asyncio.ensure_future(answer)
                self._tasks.add(task)
                task.add_done_callback(self._done)

    def ended(self, job: Any, outcome: Outcome | None, verdict: Verdict) -> None:
        """The store answered the outcome of an attempt."""
        if outcome is None or job is None:
            return
        if isinstance(verdict, Completed):
            if "completed" in self._by_event:
                self.tell("completed", job, from_json(outcome.result))
        elif isinstance(verdict, Cancelled):
            self.tell("cancelled", job)
        elif isinstance(verdict, Retried | Buried) and outcome.failure is not None:
            self.tell("failed", job, outcome.failure)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a listener failed", exc_info=error)


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The health of a worker. `stores` says for every queue whether its store answers."""

    state: str
    ready: bool
    keeper_alive: bool
    slots_used: int
    slots_total: int
    unsettled: int
    stores: dict[str, bool]


class Notifier:
    """sd_notify: datagrams to the socket that `NOTIFY_SOCKET` names.

    A name that begins with @ is abstract. Without a name nothing is sent.
    """

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def send(self, state: str) -> None:
        """Send a state; failures are ignored, because the manager may not listen."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(state.encode(), self._address)

    def ready(self, status: str) -> None:
        """Every store has answered once."""
        self.send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """It stops: no more claims, running jobs may finish."""
        self.send("STOPPING=1\nSTATUS=draining")

    def watchdog(self) -> None:
        """Loop and keeper are alive."""
        self.send("WATCHDOG=1")

    async def feed_watchdog(self, watchdog_ms: int) -> None:
        """Feed the watchdog twice in `watchdog_ms` while the event loop runs; 0: there is none."""
        while watchdog_ms:
            self.watchdog()
            await asyncio.sleep(watchdog_ms / 2000)

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
