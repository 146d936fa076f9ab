"""Who is next: the line of waiting jobs, the delayed ones, and what runs out when.

Four heaps that forget lazily: an entry counts only while the job still is what the entry says, so
that cancelling or extending never has to search.
"""

from __future__ import annotations

from heapq import heappop, heappush

from tenure.contracts.memory.stored import StoredJob


class Line:
    """The order of one queue over the store's dict of jobs; `arrivals` counts who joined."""

    def __init__(self, jobs: dict[str, StoredJob]) -> None:
        self._jobs = jobs
        self._ready: list[tuple[int, int, str]] = []
        self._delayed: list[tuple[int, int, str]] = []
        self._leases: list[tuple[int, int, str]] = []
        self._ttls: list[tuple[int, int, str]] = []
        self._last_place = 0
        self.arrivals = 0

    def append(self, job: StoredJob) -> None:
        """Put a job at the end of the line of its priority, or aside until it is due."""
        self._last_place += 1
        job.place = self._last_place
        self.insert(job)

    def insert(self, job: StoredJob) -> None:
        """Put a job where its `place` says: a released or reclaimed job keeps its turn."""
        self.arrivals += 1
        if job.due_ms:
            heappush(self._delayed, (job.due_ms, job.place, job.job_id))
        else:
            heappush(self._ready, (job.priority, job.place, job.job_id))

    def hold(self, job: StoredJob) -> None:
        """Note when the lease runs out."""
        heappush(self._leases, (job.lease_until_ms, job.fence, job.job_id))

    def watch(self, job: StoredJob) -> None:
        """Note when the job outlives its time to live."""
        heappush(self._ttls, (job.created_ms + job.ttl_ms, 0, job.job_id))

    def promote(self, now_ms: int) -> int:
        """Move what is due into the line, in the order in which it became due."""
        promoted = 0
        while self._delayed and self._delayed[0][0] <= now_ms:
            due_ms, place, job_id = heappop(self._delayed)
            job = self._waiting(job_id, place)
            if job is not None and job.due_ms == due_ms:
                job.due_ms = 0
                self.append(job)
                promoted += 1
        return promoted

    def next(self) -> StoredJob | None:
        """Take the first job out of the line."""
        while self._ready:
            _, place, job_id = heappop(self._ready)
            job = self._waiting(job_id, place)
            if job is not None and not job.due_ms:
                return job
        return None

    def overdue(self, now_ms: int) -> list[StoredJob]:
        """Jobs whose noted lease end has passed. The lease may have been extended since."""
        found: list[StoredJob] = []
        while self._leases and self._leases[0][0] <= now_ms:
            _, fence, job_id = heappop(self._leases)
            job = self._jobs.get(job_id)
            if job is not None and job.fence == fence and job.lease_until_ms:
                found.append(job)
        return found

    def outlived(self, now_ms: int) -> list[StoredJob]:
        """Waiting jobs that were not started within their time to live."""
        found: list[StoredJob] = []
        while self._ttls and self._ttls[0][0] <= now_ms:
            _, _, job_id = heappop(self._ttls)
            job = self._jobs.get(job_id)
            if job is not None and job.outlived(now_ms):
                found.append(job)
        return found

    def next_change_ms(self) -> int | None:
        """When time alone will make a job claimable: the next due time or lease end."""
        heads = [heap[0][0] for heap in (self._delayed, self._leases) if heap]
        return min(heads) if heads else None

    def _waiting(self, job_id: str, place: int) -> StoredJob | None:
        job = self._jobs.get(job_id)
        return job if job is not None and job.state == "waiting" and job.place == place else None
