"""Submits of many clients travel together, see `store.gathering`.

A job whose client left before it was sent is not stored: nobody would learn of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tenure.core.endpoint import Submits
from tenure.core.job import NewJob, Submitted
from tenure.store.gathering import Gathering

_JOBS_MAX = 100
_BYTES_MAX = 1 << 20


class GatheredSubmits:
    """`submit` of the queue behind it, one call at a time."""

    def __init__(self, queue: Submits) -> None:
        self._submits: Gathering[NewJob, Submitted] = Gathering(
            queue.submit,
            items_max=_JOBS_MAX,
            size_max=_BYTES_MAX,
            measure=lambda job: len(job.payload),
            drops_gone=True,
        )

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Like the queue's own: an error means that the fate of these jobs is unknown."""
        return await self._submits(jobs)
