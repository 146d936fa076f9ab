"""Logs and traces of a worker, with the ids of the job at work."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TextIO

import structlog

from tenure.core.encoding import one_line, printable
from tenure.core.errors import UsageError, traceback_of
from tenure.core.lease import Lease
from tenure.worker.job import Attempt, current_job, job_facts

log = structlog.get_logger("tenure.worker")


def add_job(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: adds the ids of the job whose handler wrote the line."""
    job = current_job.get(None)
    if job is not None:
        for name, value in job_facts(job).items():
            line.setdefault(name, value)
    return line


def _traceback(exc_info: Any) -> str:
    return traceback_of(exc_info[1]) if exc_info[1] is not None else ""


# If `rich` is installed, the default text renderer prints the local variables of every frame, which
# may hold credentials, and takes a second for it.
plain_errors = structlog.processors.ExceptionRenderer(_traceback)
"""A structlog processor: errors as plain tracebacks of bounded length."""


def plain_text(
    _logger: Any, _method: str, line: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """A structlog processor: escapes control characters, which a terminal would obey.

    Only a traceback has more than one line. The renderer shows other values by their repr.
    """
    for key, value in line.items():
        if isinstance(value, str):
            line[key] = printable(value if key == "exception" else one_line(value))
    return line


def text_renderer(**options: Any) -> Any:
    """Lines for people; errors have been rendered by `plain_errors`."""
    return structlog.dev.ConsoleRenderer(
        exception_formatter=structlog.dev.plain_traceback, **options
    )


class PlainFormatter(logging.Formatter):
    """The same for lines of the standard library's logging."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _traceback(ei)


def configure_logs(
    *, level: str = "info", json: bool | None = None, stream: TextIO | None = None
) -> None:
    """Set up structlog for this process; `json` None means: unless stderr is a terminal."""
    out = stream or sys.stderr
    as_json = not out.isatty() if json is None else json
    rendered: list[Any] = (
        [structlog.processors.JSONRenderer()] if as_json else [plain_text, text_renderer()]
    )
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        add_job,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        plain_errors,
    ]
    structlog.configure(
        processors=[*processors, *rendered],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        # Looked up at each line, since the application may replace it.
        logger_factory=lambda *_: structlog.PrintLogger(stream or sys.stderr),
        cache_logger_on_first_use=False,
    )


def ensure_logs() -> None:
    """Configure the logs unless the application has done so."""
    if not structlog.is_configured():
        configure_logs()


_TRACEPARENT = re.compile(r"^[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")


class Tracer:
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

    async def trace(self, attempt: Attempt, run: Callable[[], Awaitable[None]]) -> None:
        """Run an attempt inside its span and record how it ended."""
        lease = attempt.lease
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
            await run()
            self._finish(span, attempt)

    def _finish(self, span: Any, attempt: Attempt) -> None:
        outcome = attempt.outcome
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
