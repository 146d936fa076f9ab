"""What Prometheus sees of a gateway. Job ids are never labels."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from tenure.core.seam import Counts

# A series per counter that tells when it began would double them and is no metric of ours.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Metrics:
    """One registry a gateway, so that two of them in a process do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names = ("method", "route", "status")
        self._requests = Counter(
            "tenure_http_requests", "Requests answered.", names, registry=self.registry
        )
        self._seconds = Histogram(
            "tenure_http_request_duration_seconds",
            "Time from request to answer, event streams left out.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.sse_clients = Gauge(
            "tenure_sse_clients", "Event streams that are open.", registry=self.registry
        )
        self.sse_events = Counter(
            "tenure_sse_events", "Events handed to clients.", registry=self.registry
        )
        self.sse_dropped = Counter(
            "tenure_sse_slow_clients", "Clients dropped for reading too slowly.",
            registry=self.registry,
        )  # fmt: skip
        self.refused = Counter(
            "tenure_quota_refusals", "Requests and jobs that the quota of a key refused.",
            ("quota",), registry=self.registry,
        )  # fmt: skip
        self.quarantined = Counter(
            "tenure_quarantined", "Records that could not be read and were set aside.",
            ("queue",), registry=self.registry,
        )  # fmt: skip
        self._depth = Gauge(
            "tenure_queue_depth",
            "Jobs in a state now.",
            ("queue", "state"),
            registry=self.registry,
        )
        self._oldest = Gauge(
            "tenure_oldest_waiting_seconds",
            "How long the oldest waiting job has waited.",
            ("queue",),
            registry=self.registry,
        )
        self._up = Gauge(
            "tenure_store_up", "Whether the store answered.", ("queue",), registry=self.registry
        )
        self._workers = Gauge(
            "tenure_queue_workers", "Workers alive.", ("queue",), registry=self.registry
        )
        self._paused = Gauge(
            "tenure_queue_paused", "Whether no leases are handed out.", ("queue",),
            registry=self.registry,
        )  # fmt: skip
        self._by_route: dict[tuple[str, str, int], Counter] = {}
        self._timer: dict[str, Histogram] = {}

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answer. The labelled children are kept: looking them up costs more."""
        key = (method, route, status)
        counter = self._by_route.get(key)
        if counter is None:
            counter = self._by_route[key] = self._requests.labels(method, route, str(status))
        counter.inc()
        timer = self._timer.get(route)
        if timer is None:
            timer = self._timer[route] = self._seconds.labels(route)
        timer.observe(seconds)

    def streamed(self, route: str, status: int) -> None:
        """Count an event stream that has begun; its length is no latency."""
        self._requests.labels("GET", route, str(status)).inc()

    def observe(self, queue: str, counts: Counts | None) -> None:
        """Set the gauges of one queue; None when its store did not answer."""
        self._up.labels(queue).set(0 if counts is None else 1)
        if counts is None:
            return
        for state, depth in counts.states.items():
            self._depth.labels(queue, state).set(depth)
        self._oldest.labels(queue).set(counts.oldest_waiting_ms / 1000)
        self._workers.labels(queue).set(counts.workers)
        self._paused.labels(queue).set(counts.paused)

    def page(self, accept: str) -> tuple[bytes, str]:
        """The exposition in the format that the scraper prefers, and its media type."""
        if "application/openmetrics-text" in accept:
            text: bytes = openmetrics(self.registry)  # type: ignore[no-untyped-call]
            return text, OPENMETRICS
        return generate_latest(self.registry), TEXT
