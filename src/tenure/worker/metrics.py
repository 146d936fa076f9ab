"""Counters of the worker, kept as plain integers and turned into Prometheus families when read.

A locked counter child costs more than a no-op job may; a collector that reads integers at scrape
time costs nothing per job but the addition.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

WAIT_S = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 1800.0, 3600.0)
RUN_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 1800.0)


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
        """The form in which Prometheus wants it."""
        seen, rows = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            rows.append((bound, float(seen)))
        return rows


class Tally:
    """What happened to the jobs of one task of one queue."""

    __slots__ = ("finished", "lost", "queue", "retried", "run", "started", "task", "wait")

    def __init__(self, queue: str, task: str) -> None:
        self.queue = queue
        self.task = task
        self.started = 0
        self.retried = 0
        self.lost = 0
        self.finished: dict[str, int] = {}
        self.wait = Buckets(WAIT_S)
        self.run = Buckets(RUN_S)


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
        """The tally of a task of a queue, made when first asked for."""
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
        yield _counter("jobs_started", "attempts begun", tallies, lambda tally: tally.started)
        yield _counter("jobs_retried", "attempts sent back", tallies, lambda tally: tally.retried)
        yield _counter("lease_lost", "leases lost while held", tallies, lambda tally: tally.lost)
        yield _finished(tallies)
        yield _quarantined(self.quarantined.copy())
        yield _histogram(
            "job_wait", "from submit to first start", tallies, lambda tally: tally.wait
        )
        yield _histogram("job_run", "from start to outcome", tallies, lambda tally: tally.run)
        used, total = self._slots()
        yield GaugeMetricFamily("tenure_slots_used", "slots in use", value=used)
        yield GaugeMetricFamily("tenure_slots", "slots there are", value=total)

    def describe(self) -> Iterator[Metric]:
        """Empty, so that registering does not collect."""
        return iter(())


def _counter(
    name: str, about: str, tallies: list[Tally], value: Callable[[Tally], int]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"tenure_{name}", about, labels=("queue", "task"))
    for tally in tallies:
        family.add_metric((tally.queue, tally.task), value(tally))
    return family


def _finished(tallies: list[Tally]) -> CounterMetricFamily:
    labels = ("queue", "task", "outcome")
    family = CounterMetricFamily("tenure_jobs_finished", "attempts by outcome", labels=labels)
    for tally in tallies:
        for outcome, count in tally.finished.copy().items():
            family.add_metric((tally.queue, tally.task, outcome), count)
    return family


def _quarantined(by_queue: dict[str, int]) -> CounterMetricFamily:
    about = "records that could not be read and were set aside"
    family = CounterMetricFamily("tenure_quarantined", about, labels=("queue",))
    for queue, count in by_queue.items():
        family.add_metric((queue,), count)
    return family


def _histogram(
    name: str, about: str, tallies: list[Tally], of: Callable[[Tally], Buckets]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"tenure_{name}_seconds", about, labels=("queue", "task"))
    for tally in tallies:
        buckets = of(tally)
        family.add_metric((tally.queue, tally.task), buckets.cumulative(), buckets.total)
    return family
