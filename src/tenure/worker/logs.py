"""Structured logs on stderr: JSON lines, or readable ones on a terminal.

The ids of the job that is being run are added to every line that its handler (or anything it
calls) writes; they are looked up when a line is written, so a job that logs nothing pays nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from tenure.core.errors import traceback_of
from tenure.core.printable import one_line, printable
from tenure.worker.job import current_job, job_facts


def add_job(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: which job's handler wrote this line."""
    job = current_job.get(None)
    if job is not None:
        for name, value in job_facts(job).items():
            line.setdefault(name, value)
    return line


def _traceback(exc_info: Any) -> str:
    return traceback_of(exc_info[1]) if exc_info[1] is not None else ""


# The usual text renderer prints the local variables of every frame where `rich` is installed: they
# hold keys and credentials, and rendering them takes a second.
plain_errors = structlog.processors.ExceptionRenderer(_traceback)
"""A structlog processor: errors as plain tracebacks of bounded length."""


def plain_text(
    _logger: Any, _method: str, line: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """A structlog processor: text of strangers that a terminal shows and does not obey.

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
        # Looked up at each line, since a library's user may replace it.
        logger_factory=lambda *_: structlog.PrintLogger(stream or sys.stderr),
        cache_logger_on_first_use=False,
    )


def ensure_logs() -> None:
    """Configure unless the application has done so: its own set-up is left alone."""
    if not structlog.is_configured():
        configure_logs()
