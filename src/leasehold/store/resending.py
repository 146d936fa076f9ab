"""Submitting again after a lost answer.

For jobs whose ids are chosen already: the store answers a repetition with the job it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from leasehold.core.errors import StoreError
from leasehold.core.intake import Submits
from leasehold.core.job import NewJob, Submitted

_TRIES = 3
_PATIENCE_S = 3.0


async def submit_surely(queue: Submits, jobs: Sequence[NewJob]) -> list[Submitted]:
    """Store jobs, asked again while answers are lost, unless that has taken too long already."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _PATIENCE_S
    for _ in range(_TRIES - 1):
        try:
            return await queue.submit(jobs)
        except StoreError:
            if loop.time() > until:
                raise
    return await queue.submit(jobs)
