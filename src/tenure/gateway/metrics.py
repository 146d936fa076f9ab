"""The Prometheus metrics of a gateway. Job ids are never labels."""

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

from tenure.core.portable import word_state
from tenure.core.seam import Counts

# Otherwise every counter has a second series with its creation time.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Metrics:
    """The metrics of one gateway. Each has its own registry: a process may run two gateways."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter(
            "tenure_http_requests", "Requests answered.", "method", "route", "status"
        )
        self._seconds = Histogram(
            "tenure_http_request_duration_seconds",
            "Time from request to answer, event streams left out.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.sse_clients = self._gauge("tenure_sse_clients", "Event streams that are open.")
        self.sse_events = self._counter("tenure_sse_events", "Events handed to clients.")
        self.sse_dropped = self._counter(
            "tenure_sse_slow_clients", "Clients dropped for reading too slowly."
        )
        self.refused = self._counter(
            "tenure_quota_refusals", "Requests and jobs that the quota of a key refused.", "quota"
        )
        self.quarantined = self._counter(
            "tenure_quarantined", "Records that could not be read and were set aside.", "queue"
        )
        self._depth = self._gauge(
            "tenure_queue_depth",
            "Jobs in a state now; own_state is the contract's word for it.",
            "queue",
            "state",
            "own_state",
        )
        self._oldest = self._gauge(
            "tenure_oldest_waiting_seconds", "How long the oldest waiting job has waited.", "queue"
        )
        self._up = self._gauge("tenure_store_up", "Whether the store answered.", "queue")
        self._workers = self._gauge("tenure_queue_workers", "Workers alive.", "queue")
        self._paused = self._gauge(
            "tenure_queue_paused", "Whether no leases are handed out.", "queue"
        )
        self._by_route: dict[tuple[str, str, int], Counter] = {}
        self._timers: dict[str, Histogram] = {}

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one response. The labelled metrics are cached, because `labels` is slow."""
        key = (method, route, status)
        counter = self._by_route.get(key)
        if counter is None:
            counter = self._by_route[key] = self._requests.labels(method, route, str(status))
        counter.inc()
        timer = self._timers.get(route)
        if timer is None:
            timer = self._timers[route] = self._seconds.labels(route)
        timer.observe(seconds)

    def streamed(self, route: str, status: int) -> None:
        """Count an event stream; its duration is not a latency."""
        self._requests.labels("GET", route, str(status)).inc()

    def observe(self, queue: str, contract: str, counts: Counts | None) -> None:
        """Set the gauges of one queue; `counts` is None if its store did not answer."""
        self._up.labels(queue).set(0 if counts is None else 1)
        if counts is None:
            return
        for word, depth in counts.states.items():
            self._depth.labels(queue, word_state(contract, word) or "waiting", word).set(depth)
        self._oldest.labels(queue).set(counts.oldest_waiting_ms / 1000)
        self._workers.labels(queue).set(counts.workers)
        self._paused.labels(queue).set(counts.paused)

    def page(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the format that the scraper accepts, and its media type."""
        if "application/openmetrics-text" in accept:
            text: bytes = openmetrics(self.registry)  # type: ignore[no-untyped-call]
            return text, _OPENMETRICS
        return generate_latest(self.registry), TEXT
