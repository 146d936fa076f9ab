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

from leasehold.worker.job import current_job, job_facts


def add_job(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: which job's handler wrote this line."""
    job = current_job.get(None)
    if job is not None:
        for name, value in job_facts(job).items():
            line.setdefault(name, value)
    return line


def configure_logs(
    *, level: str = "info", json: bool | None = None, stream: TextIO | None = None
) -> None:
    """Set up structlog for this process; `json` None means: unless stderr is a terminal."""
    out = stream or sys.stderr
    as_json = not out.isatty() if json is None else json
    renderer: Any = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    )
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        add_job,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )


def ensure_logs() -> None:
    """Configure unless the application has done so: its own set-up is left alone."""
    if not structlog.is_configured():
        configure_logs()
