"""The logs of `worker` and `gateway`: on stderr, as text for people or JSON for machines."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import structlog

from tenure.cli.config import Config, colours_wanted
from tenure.core.errors import UsageError
from tenure.worker.telemetry import PlainFormatter, plain_errors, plain_text, text_renderer

_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}
_FORMATS = ("auto", "json", "text")


def set_up_logs(config: Config, level: str | None = None, *, add: Sequence[Any] = ()) -> str:
    """Route structlog and the standard library's logging to stderr; returns the level's name.

    `add` are further processors, such as the worker's that adds the ids of the running job.
    """
    name, style = config.text("log_level", level).lower(), config.text("log_format")
    if name not in _LEVELS:
        raise UsageError(f"log_level is {name!r}; it is one of {', '.join(_LEVELS)}")
    if style not in _FORMATS:
        raise UsageError(f"log_format is {style!r}; it is one of {', '.join(_FORMATS)}")
    as_text = style == "text" or (style == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[*add, *_processors(as_text)],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[name]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter(logging.BASIC_FORMAT))
    logging.basicConfig(level=max(_LEVELS[name], logging.WARNING), handlers=[handler], force=True)
    return name


def _processors(as_text: bool) -> list[Any]:
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        plain_errors,
    ]
    if as_text:
        return [
            *shared,
            structlog.processors.TimeStamper(fmt="%H:%M:%S"),
            plain_text,
            text_renderer(colors=colours_wanted(sys.stderr), pad_event_to=0),
        ]
    return [
        *shared,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        structlog.processors.JSONRenderer(),
    ]
