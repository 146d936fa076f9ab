"""OpenTelemetry spans, when asked for: one CONSUMER span per attempt, linked to its producer.

A link and not a parent, because a job may run hours after the request that submitted it, and more
than once. Nothing here is imported or called while tracing is off.
"""

from __future__ import annotations

import re
from typing import Any

from tenure.core.errors import UsageError
from tenure.core.lease import Lease
from tenure.worker.execute import Life
from tenure.worker.holding import Attempt
from tenure.worker.task import Task

_TRACEPARENT = re.compile(r"^[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")


class OtelTracer:
    """Starts a span for every attempt; `provider` defaults to the process's own."""

    def __init__(self, worker_id: str, provider: Any = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError:
            raise UsageError(
                "tracing is on but OpenTelemetry is not installed; pip install tenure[otel]"
            ) from None
        self._trace = trace
        self._tracer = trace.get_tracer("tenure.worker", tracer_provider=provider)
        self._worker_id = worker_id

    async def trace(self, attempt: Attempt, life: Life, task: Task) -> None:
        """Run `life` inside its span and note how it ended."""
        lease = attempt.held.lease
        with self._tracer.start_as_current_span(
            f"process {lease.queue}",
            kind=self._trace.SpanKind.CONSUMER,
            links=self._links(lease),
            attributes={
                "messaging.system": "tenure",
                "messaging.operation.name": "process",
                "messaging.operation.type": "process",
                "messaging.destination.name": lease.queue,
                "messaging.message.id": lease.job_id,
                "messaging.client.id": self._worker_id,
                "tenure.task": lease.task,
                "tenure.attempt": lease.attempt,
            },
        ) as span:
            await life(attempt, task)
            self._finish(span, attempt)

    def _finish(self, span: Any, attempt: Attempt) -> None:
        outcome = attempt.held.outcome
        kind = outcome.kind if outcome is not None else "lost"
        span.set_attribute("tenure.outcome", kind)
        if outcome is None or outcome.failure is not None:
            code = outcome.failure.code if outcome and outcome.failure else "lease_lost"
            span.set_attribute("error.type", code)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, code))

    def _links(self, lease: Lease) -> list[Any]:
        """The producer's context, if the job carries a W3C traceparent that can be read."""
        match = _TRACEPARENT.match(lease.trace)
        if match is None:
            return []
        context = self._trace.SpanContext(
            trace_id=int(match[1], 16),
            span_id=int(match[2], 16),
            is_remote=True,
            trace_flags=self._trace.TraceFlags(int(match[3], 16)),
        )
        return [self._trace.Link(context)] if context.is_valid else []
