"""Lines of the log, for the parts of this contract that run without `tenure.Worker`."""

from __future__ import annotations

from collections.abc import Iterable

from tenure.core.seam import Quarantined


def warn(text: str, **facts: object) -> None:
    """A warning. Programs that only look at a queue do not load what writes it."""
    import structlog

    structlog.get_logger("tenure.omniq").warning(text, **facts)


def warn_quarantined(queue: str, records: Iterable[Quarantined]) -> None:
    """One line for each record that was set aside."""
    for record in records:
        warn("record_quarantined", queue=queue, job_id=record.job_id, reason=record.reason)
