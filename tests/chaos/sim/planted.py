"""Five stores, each with one rule broken on purpose: a checker must find every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenure.contracts.memory import MemoryQueue
from tenure.contracts.memory.store import MemoryStore, StoredJob
from tenure.core.errors import LeaseLost
from tenure.core.job import NewJob, Submitted
from tenure.core.lease import Lease
from tenure.core.outcome import Outcome, Verdict


class NoFence(MemoryStore):
    """Whoever comes may write, as long as somebody runs the job."""

    def guard(self, lease: Lease, operation: str) -> StoredJob | LeaseLost:
        job = self.jobs.get(lease.job_id)
        if job is not None and job.state == "running":
            return job
        return super().guard(lease, operation)


class NoReclaim(MemoryStore):
    """A lease that ran out stays with its dead holder."""

    def reclaim(self, job: StoredJob) -> None:
        pass


class UnguardedReaper(MemoryStore):
    """The reaper acts on what it saw earlier, not on the lease as it is now."""

    def ran_out(self, job: StoredJob) -> bool:
        return job.state == "running"


class NonIdempotentSettle(MemoryStore):
    """A settle that is sent again is judged as if it were new."""

    def replayed(self, outcome: Outcome, settle_h: str) -> Verdict | None:
        return None


class SplitSubmit(MemoryStore):
    """Storing a job does not make it claimable; that is a second step."""

    def make_claimable(self, job: StoredJob) -> None:
        pass

    def enqueue(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            super().make_claimable(self.jobs[job_id])


class SplitSubmitQueue(MemoryQueue):
    """Stores first and enqueues what was new in a second call."""

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        answers = await super().submit(jobs)
        created = [answer.job_id for answer in answers if answer.status == "created"]

        def enqueue(store: MemoryStore) -> None:
            assert isinstance(store, SplitSubmit)
            store.enqueue(created)

        await self._wire("enqueue", enqueue)
        return answers


@dataclass(frozen=True)
class Rules:
    """Which store and which queue a simulation runs on."""

    store: type[MemoryStore] = MemoryStore
    queue: type[MemoryQueue] = MemoryQueue


SOUND = Rules()

PLANTED: dict[str, tuple[Rules, set[str]]] = {
    "no_fence": (Rules(store=NoFence), {"I8"}),
    "split_submit": (Rules(store=SplitSubmit, queue=SplitSubmitQueue), {"I1"}),
    "no_reclaim": (Rules(store=NoReclaim), {"I1"}),
    "unguarded_reaper": (Rules(store=UnguardedReaper), {"I10"}),
    "non_idempotent_settle": (Rules(store=NonIdempotentSettle), {"I12"}),
}
"""Each fault with the rules that have it, and the invariant by which it must be found."""
