"""Events, logs and traces of a worker.

`Watch` counts events for the parts of the worker and for tests, `Listeners` calls functions of the
application, `Notifier` speaks to systemd.

Logs are structured lines on stderr: JSON, or text on a terminal. The ids of the running job are
added when its handler writes a line, so that a job without logs costs nothing. With tracing on,
each attempt has a CONSUMER span that is linked to its producer. It is a link and not a parent,
because a job may run hours after the request that submitted it, and more than once.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import re
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Literal, TextIO, get_args

import structlog

from tenure.core.encoding import from_json, one_line, printable
from tenure.core.errors import UsageError, traceback_of
from tenure.core.lease import Lease
from tenure.core.outcome import Buried, Cancelled, Completed, Retried, Verdict
from tenure.worker.job import Attempt, current_job, job_facts

log = structlog.get_logger("tenure.worker")

Hook = Callable[[str, int], None]

_ACTIVITY = ("claimed", "settled", "lost")


class Watch:
    """Counts events by name, so that tests wait for one instead of sleeping; not thread-safe.

    The names: contact, ready, claimed, claim_failed, dry, started, ended, abandoned, reported,
    report_failed, settled, settle_failed, extended, extend_failed, lost, upkeep, draining,
    releasing, drained, stopped. `activity` is a number that grows whenever jobs come or go.
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

    def ended(self, attempt: Attempt, verdict: Verdict) -> None:
        """The store answered the outcome of an attempt."""
        outcome = attempt.outcome
        if outcome is None or attempt.job is None:
            return
        if isinstance(verdict, Completed):
            if "completed" in self._by_event:
                self.tell("completed", attempt.job, from_json(outcome.result))
        elif isinstance(verdict, Cancelled):
            self.tell("cancelled", attempt.job)
        elif isinstance(verdict, Retried | Buried) and outcome.failure is not None:
            self.tell("failed", attempt.job, outcome.failure)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a listener failed", exc_info=error)


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

    async def trace(self, attempt: Attempt, life: Callable[[], Awaitable[None]]) -> None:
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
            await life()
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
