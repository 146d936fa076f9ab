"""Metrics of a worker: plain integers, turned into Prometheus families at scrape time.

The locked counters of prometheus_client would cost more than a no-op job.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

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
        """Called by Prometheus, in whatever thread it likes."""
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
