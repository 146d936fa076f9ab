"""Logs and traces of a worker, with the ids of the job at work.

All lines go through the standard library's logging, those of structlog too, so that its handlers
and integrations (Sentry, OpenTelemetry) see everything. What the application has configured is left
alone: our handler is added only where there is none, and structlog is configured only if it is not.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import re
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TextIO

import structlog

from tenure.core.encoding import one_line, printable
from tenure.core.errors import UsageError, traceback_of
from tenure.core.lease import Lease
from tenure.worker.job import Attempt, CallNext, Job, attempt_facts, current_job, job_facts

log = structlog.get_logger("tenure.worker")

Line = MutableMapping[str, Any]

_OWN = logging.getLogger("tenure")
_OWN.addHandler(logging.NullHandler())  # else Python prints errors where logging is not set up


def add_job(_logger: Any, _method: str, line: Line) -> Line:
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
_plain_errors = structlog.processors.ExceptionRenderer(_traceback)


def _plain_text(_logger: Any, _method: str, line: Line) -> Line:
    """Escapes control characters, which a terminal would obey.

    Only a traceback has more than one line. The renderer shows other values by their repr.
    """
    for key, value in line.items():
        if isinstance(value, str):
            line[key] = printable(value if key == "exception" else one_line(value))
    return line


def _to_record(_logger: Any, _method: str, line: Line) -> tuple[tuple[str], dict[str, Any]]:
    """A line of structlog as arguments of the standard logger: fields follow the text.

    Our own handler takes the fields from the record instead.
    """
    kept = {name: line.pop(name) for name in ("exc_info", "stack_info") if name in line}
    text = [str(line["event"]), *(f"{k}={v!r}" for k, v in line.items() if k != "event")]
    return (" ".join(text),), {**kept, "extra": {"tenure_line": line}}


def _fields_of_record(_logger: Any, _method: str, line: Line) -> Line:
    """The line of structlog that a record was made of; a line of another library gets its logger's
    name."""
    record = line["_record"]
    line.update(getattr(record, "tenure_line", {"logger": record.name}))
    return line


# One list that stays, since structlog is asked for it to see whether it is still ours.
_TO_LOGGING: list[Any] = [
    structlog.stdlib.filter_by_level,
    structlog.contextvars.merge_contextvars,
    add_job,
    structlog.stdlib.PositionalArgumentsFormatter(),
    _to_record,
]


def _formatter(as_json: bool, colours: bool) -> logging.Formatter:
    stamp = (
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts")
        if as_json
        else structlog.processors.TimeStamper(fmt="%H:%M:%S")
    )
    text = structlog.dev.ConsoleRenderer(
        colors=colours, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            _fields_of_record,
            structlog.contextvars.merge_contextvars,
            add_job,
            structlog.processors.add_log_level,
            _plain_errors,
            stamp,
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *([structlog.processors.JSONRenderer()] if as_json else [_plain_text, text]),
        ],
    )


class _Handler(logging.StreamHandler[TextIO]):
    """Writes lines as JSON or text; without a stream to what is stderr at that moment."""

    def __init__(
        self, as_json: bool | None, stream: TextIO | None, colours: bool | None, others: str
    ) -> None:
        super().__init__(stream)
        self.others = others
        self._follows_stderr = stream is None
        terminal = self.stream.isatty()
        self.as_json = not terminal if as_json is None else as_json
        self.setFormatter(_formatter(self.as_json, terminal if colours is None else colours))

    def emit(self, record: logging.LogRecord) -> None:
        if self._follows_stderr:
            self.stream = sys.stderr  # the application may replace it
        super().emit(record)


def configure_logs(
    *,
    level: str = "info",
    json: bool | None = None,
    stream: TextIO | None = None,
    colours: bool | None = None,
    others: str = "",
    early: bool = False,
) -> None:
    """Send the lines of structlog and of logging to stderr or `stream`.

    `json` None means: unless that is a terminal. `others` is the level of loggers that are not
    ours, by default warning: libraries log what to us is secret. `early` is for a process that has
    yet to import an application, which may set up logging: only our own lines are shown, until
    `ensure_logs` is called.
    """
    _route_structlog()
    for each in (logging.root, _OWN):
        _take_handler(each)
    _OWN.setLevel(level.upper())
    others = others or ("error" if level == "error" else "warning")
    _serve(_OWN if early else logging.root, _Handler(json, stream, colours, others))


def ensure_logs(**options: Any) -> None:
    """Set up what the application has not; `options` as in `configure_logs`."""
    early = _take_handler(_OWN)
    if structlog.is_configured() and structlog.get_config()["processors"] is not _TO_LOGGING:
        return
    if logging.root.handlers:
        _route_structlog()
    elif early is not None:
        _serve(logging.root, early)
    else:
        configure_logs(**options)


def _serve(logger: logging.Logger, handler: _Handler) -> None:
    logger.addHandler(handler)
    if logger is logging.root:
        logger.setLevel(handler.others.upper())


def _take_handler(logger: logging.Logger) -> _Handler | None:
    """Our handler, taken off this logger."""
    for handler in logger.handlers:
        if isinstance(handler, _Handler):
            logger.removeHandler(handler)
            return handler
    return None


def log_options() -> dict[str, Any]:
    """The options of `configure_logs` that a child process needs to log as this one does."""
    for handler in logging.root.handlers:
        if isinstance(handler, _Handler):
            level = logging.getLevelName(_OWN.getEffectiveLevel())
            return {"level": level, "others": handler.others, "json": handler.as_json}
    return {}


def _route_structlog() -> None:
    structlog.configure(
        processors=_TO_LOGGING,
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # the application may still configure structlog
    )


_RECORD_FIELDS = ("tenure_job_id", "tenure_task", "tenure_queue", "tenure_attempt")


def mark_records() -> None:
    """Put the ids of the job at work on every record, so that any handler and format can show them.

    Outside of jobs they are empty. They have a prefix, because logging refuses an `extra` of the
    application with a name that a record has already.
    """
    made_by = logging.getLogRecordFactory()
    if getattr(made_by, "marks_jobs", False):
        return

    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = made_by(*args, **kwargs)
        job = current_job.get(None)
        ids = attempt_facts(job._attempt).values() if job is not None else ("", "", "", "")
        record.__dict__.update(zip(_RECORD_FIELDS, ids, strict=True))
        return record

    make.marks_jobs = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make)


async def sentry_scope(attempt: Job, call_next: CallNext) -> Any:
    """Middleware: each attempt has a Sentry scope of its own, with the job's ids as tags.

    It is not needed for failures: a job's failure is logged as an error, with its traceback, and
    Sentry reports what is logged as an error. In this scope the report has the tags, and what the
    handler left there.
    """
    import sentry_sdk

    with sentry_sdk.isolation_scope() as scope:
        scope.set_transaction_name(attempt.task, source="task")
        for name, value in attempt_facts(attempt._attempt).items():
            scope.set_tag(f"tenure.{name}", value)
        return await call_next(attempt)


def log_failure(attempt: Attempt, job: Job, *, retried: bool) -> None:
    """Log a failed attempt, in the context that its handler failed in.

    Once by logging, with the error itself, and by structlog too where that goes elsewhere.
    """
    context = attempt.context or contextvars.copy_context()
    with contextlib.suppress(Exception):  # what an application set up must not stop the worker
        context.run(_log_failure, attempt, job, retried)


def _log_failure(attempt: Attempt, job: Job, retried: bool) -> None:
    current_job.set(job)
    failure = attempt.outcome.failure if attempt.outcome is not None else None
    error = one_line(f"{failure.code}: {failure.message}") if failure is not None else ""
    fields = {**attempt_facts(attempt), "error": error}
    event = "attempt failed, it will be retried" if retried else "job failed"
    text = f"{event}: %(task)s %(job_id)s, attempt %(attempt)s, queue %(queue)s: %(error)s"
    # Names and errors are of others, and the handler of an application may write to a terminal.
    shown = {
        name: printable(one_line(value)) if isinstance(value, str) else value
        for name, value in fields.items()
    }
    logging.getLogger("tenure.worker").log(
        logging.WARNING if retried else logging.ERROR,
        text,
        shown,
        exc_info=attempt.error,
        extra={"tenure_line": {"event": event, **fields}},
    )
    structured = log.bind()
    if not isinstance(getattr(structured, "_logger", None), logging.Logger):
        write = structured.warning if retried else structured.error
        write(event, **fields, exc_info=attempt.error)


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
            if attempt.error is not None:
                span.record_exception(attempt.error)
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
