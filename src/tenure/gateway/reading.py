"""Reading event streams so that one unreadable job cannot silence the others.

Any program can write into Redis. A key of the wrong type, or a field that is no text, must end the
streams of its own followers and nobody else's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import structlog

from tenure.core.errors import ServerError, StoreError
from tenure.core.job import JobEvent, JobRecord

_log = structlog.get_logger("tenure.gateway")


class FollowLedger(Protocol):
    """What the feed needs of a contract's ledger."""

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None if there is none (any more)."""

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """Events of one job after a cursor."""

    async def changes(self, cursors: Mapping[str, str]) -> dict[str, list[JobEvent]]:
        """New events of many jobs, each after its own cursor, without waiting."""


def is_away(error: Exception) -> bool:
    """Whether the store as a whole is in trouble, so that waiting helps."""
    wrong_type = isinstance(error, ServerError) and str(error.reply).startswith("WRONGTYPE")
    return isinstance(error, StoreError) and not wrong_type


async def read_changes(
    ledger: FollowLedger, cursors: Mapping[str, str]
) -> tuple[dict[str, list[JobEvent]], list[str]]:
    """New events by job, and the jobs that cannot be read, which are found by halving."""
    try:
        return await ledger.changes(cursors), []
    except Exception as error:
        if is_away(error):
            raise
        if len(cursors) == 1:
            _log.warning("events_unreadable", job_id=next(iter(cursors)), error=str(error))
            return {}, list(cursors)
    pairs = list(cursors.items())
    left, left_bad = await read_changes(ledger, dict(pairs[: len(pairs) // 2]))
    right, right_bad = await read_changes(ledger, dict(pairs[len(pairs) // 2 :]))
    return left | right, left_bad + right_bad
