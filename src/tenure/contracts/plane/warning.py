"""Lines of the plane's log."""

from __future__ import annotations


def warn(text: str, **facts: object) -> None:
    """Write a line. Whoever only looks at a queue does not load what writes it."""
    import structlog

    structlog.get_logger("tenure.plane").warning(text, **facts)
