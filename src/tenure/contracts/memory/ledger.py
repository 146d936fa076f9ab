"""The reading and steering side of a memory queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tenure.contracts.memory import steering
from tenure.contracts.memory.contents import Contents
from tenure.contracts.memory.sharing import SharedStore
from tenure.core.job import JobEvent, JobRecord
from tenure.core.seam import Counts, Page, Query, WorkerBeat, first_page


class MemoryLedger:
    """Gets, lists and steers the jobs of one shared store."""

    def __init__(self, shared: SharedStore) -> None:
        self._shared = shared

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None."""

        def read(contents: Contents) -> JobRecord | None:
            job = contents.jobs.get(job_id)
            return job.record() if job else None

        return self._shared.run(lambda store: read(store.contents))

    async def find(self, query: Query) -> Page:
        """Jobs newest first."""
        return self._shared.run(lambda store: steering.find(store.contents, query))

    async def counts(self) -> Counts:
        """Depths and totals."""
        return self._shared.run(lambda store: steering.count(store.contents))

    async def workers(self) -> list[WorkerBeat]:
        """Workers that asked for work lately."""
        return self._shared.run(lambda store: steering.workers(store.contents))

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """The job's own events after a cursor, oldest first."""

        def read(contents: Contents) -> list[JobEvent]:
            job = contents.jobs.get(job_id)
            kept = job.events if job else []
            left = [event for event in kept if int(event.event_id) > int(after or 0)]
            return first_page(left, limit)

        return self._shared.run(lambda store: read(store.contents))

    async def pause(self) -> None:
        """Stop handing out leases."""
        self._pause(paused=True)

    async def resume(self) -> None:
        """Hand out leases again."""
        self._pause(paused=False)

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Send finished jobs back."""
        return self._each(steering.reopen, job_ids)

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """End waiting jobs, ask the holders of running ones."""
        return self._each(steering.cancel, job_ids)

    async def remove(self, job_ids: Sequence[str]) -> list[str]:
        """Delete jobs that nobody runs."""
        return self._each(steering.remove, job_ids)

    async def close(self) -> None:
        """Nothing is open."""

    def _each(self, steer: Callable[[Contents, str], str], job_ids: Sequence[str]) -> list[str]:
        return self._shared.run(lambda store: [steer(store.contents, job_id) for job_id in job_ids])

    def _pause(self, *, paused: bool) -> None:
        self._shared.run(lambda store: steering.pause(store.contents, paused=paused))
