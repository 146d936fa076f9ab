"""The reference contract: what every queue of Tenure means, as plain rules over dicts.

No I/O, no clock and no randomness of its own: `now_ms` and `random` come in, so that a test or a
simulation decides them. Every method is part of one atomic step (the caller holds the lock and has
called `begin`) that checks first and writes last. Every change of state goes through
`History.step`, which asks the table `core.state.MEMORY` and writes the journal event with it.

The rules that a test may break on purpose are methods: `guard`, `place`, `reclaim`, `ran_out` and
`replayed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random, SystemRandom

from tenure.contracts.memory.claiming import ClaimId, Unanswered
from tenure.contracts.memory.contents import Contents
from tenure.contracts.memory.options import MemoryOptions
from tenure.contracts.memory.settling import Closing, apply
from tenure.contracts.memory.stored import StoredJob
from tenure.contracts.memory.submitting import admit
from tenure.core.errors import LeaseLost
from tenure.core.idempotency import short_hash
from tenure.core.job import NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Verdict
from tenure.core.seam import Upkeep


class MemoryStore:
    """All jobs of one queue name; `contents` is what `steering` and the ledger read."""

    def __init__(
        self,
        name: str,
        options: MemoryOptions,
        *,
        now_ms: Callable[[], int],
        random: Random | None = None,
    ) -> None:
        self.options = options
        self._clock = now_ms
        self._now_ms = now_ms()
        self.contents = Contents(name, options, self.now_ms, random or SystemRandom())
        self._line = self.contents.line
        self._history = self.contents.history
        self._unanswered = Unanswered(self.contents.jobs)

    def now_ms(self) -> int:
        """The time of the step that is under way: it stands still until the next `begin`."""
        return self._now_ms

    def begin(self) -> None:
        """A new step begins; everything in it happens at one moment."""
        self._now_ms = self._clock()

    # The seam, without waiting.

    def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store each job, or say why not."""
        return [self._submit(job) for job in jobs]

    def claim(self, worker_id: str, claim: ClaimId, limit: int) -> list[Lease]:
        """Hand out again what a lost answer took, then lease the first jobs in line."""
        if not self._unanswered.begin(claim):
            return []
        now_ms = self.now_ms()
        self.contents.workers[worker_id] = now_ms
        taken = self._unanswered.again(claim, limit)
        for job in taken:
            self._prolong(job, job.token)
        if not self.contents.paused and len(taken) < limit:
            self.reclaim()
            self._line.promote(now_ms)
            taken += self._take(worker_id, limit - len(taken))
        self._unanswered.sent(claim, taken)
        return [job.lease(self.now_ms()) for job in taken]

    def told(self, worker_id: str, slots: int) -> None:
        """A worker says how many jobs it runs at once; 0 says nothing."""
        if slots:
            self.contents.workers[worker_id] = self.now_ms()
            self.contents.slots[worker_id] = slots

    def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Keep leases; writes only when less than two thirds of the lease are left (M-12)."""
        return [self._extend(lease) for lease in leases]

    def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Add news to the job's own events while the lease is held."""
        return [self._report(report) for report in reports]

    def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases; a resent outcome gets the verdict it got before."""
        return [self._settle(outcome) for outcome in outcomes]

    def upkeep(self) -> Upkeep:
        """Promote, reclaim, expire and trim; changes nothing that is not due."""
        before = self._history.totals.copy()
        promoted = self._line.promote(self.now_ms())
        self.reclaim()
        for job in self._line.outlived(self.now_ms()):
            self._expire(job)
        since = self._history.totals - before
        return Upkeep(
            promoted=promoted,
            reclaimed=since["reap"],
            buried=since["bury"],
            expired=since["expire"],
            trimmed=self.contents.trim(),
        )

    def use(self, options: MemoryOptions) -> None:
        """Take over options; leases that are out keep theirs until they are extended."""
        self.options = self.contents.options = options

    def forget(self, instance: str) -> None:
        """The instance is closed and will not ask for a lost answer any more."""
        self._unanswered.forget(instance)

    def next_change_ms(self) -> int | None:
        """When time alone may make a job claimable; None when only a call can."""
        return None if self.contents.paused else self._line.next_change_ms()

    # Rules that a test may break on purpose.

    def guard(self, lease: Lease, operation: str) -> StoredJob | LeaseLost:
        """The job, if this very lease is the one that holds it (M-11)."""
        job = self.contents.jobs.get(lease.job_id)
        if job is None:
            return self._refuse(None, lease, operation, "there is no such job (any more)")
        if job.state != "running":
            reason = f"the lease has ended, the job is {job.state}"
            return self._refuse(job, lease, operation, reason)
        if (job.fence, job.token) != (lease.fence, lease.token):
            reason = f"fence {lease.fence} is stale, the job is leased with fence {job.fence}"
            return self._refuse(job, lease, operation, reason)
        return job

    def place(self, job: StoredJob) -> None:
        """Make a stored job claimable: part of the same step as storing it (M-2)."""
        self._line.append(job)

    def reclaim(self) -> None:
        """Take back every lease that ran out (M-13)."""
        for job in self._line.overdue(self.now_ms()):
            if self.ran_out(job):
                self._reap(job)

    def ran_out(self, job: StoredJob) -> bool:
        """Whether the lease is over now, counting every extension since its end was noted."""
        return job.state == "running" and job.lease_until_ms <= self.now_ms()

    def replayed(self, outcome: Outcome, closing: Closing) -> Verdict | None:
        """The verdict that this lease already got for this same outcome, if any (M-17)."""
        job = self.contents.jobs.get(outcome.lease.job_id)
        return closing.verdict_of(job) if job is not None else None

    # Steps.

    def _submit(self, new: NewJob) -> Submitted:
        answer = admit(self.contents, new)
        if isinstance(answer, Submitted):
            return answer
        self.contents.enter(answer)
        self.place(answer)
        return Submitted(answer.job_id, "created")

    def _settle(self, outcome: Outcome) -> Verdict:
        closing = Closing.of(outcome)
        again = self.replayed(outcome, closing)
        if again is not None:
            return again
        job = self.guard(outcome.lease, "settle")
        if isinstance(job, LeaseLost):
            return job
        verdict = apply(self.contents, job, outcome)
        closing.keep(job, verdict)
        return verdict

    def _take(self, worker_id: str, limit: int) -> list[StoredJob]:
        taken: list[StoredJob] = []
        while len(taken) < limit and (job := self._line.next()) is not None:
            if job.outlived(self.now_ms()):
                self._expire(job)
                continue
            self._lease(job, worker_id)
            taken.append(job)
        return taken

    def _lease(self, job: StoredJob, worker_id: str) -> None:
        now_ms = self.now_ms()
        self._history.step(
            job,
            "claim",
            "running",
            attempt=job.attempt + 1,
            fence=job.fence + 1,
            token=f"{self.contents.random.getrandbits(64):016x}",
            worker_id=worker_id,
            lease_until_ms=now_ms + self.options.lease_ms,
        )
        self._line.hold(job)

    def _extend(self, lease: Lease) -> Lease | LeaseLost:
        job = self.guard(lease, "extend")
        if isinstance(job, LeaseLost):
            return job
        if 3 * (job.lease_until_ms - self.now_ms()) < 2 * self.options.lease_ms:
            self._prolong(job, lease.token)
        return job.lease(self.now_ms())

    def _prolong(self, job: StoredJob, token: str) -> None:
        until_ms = self.now_ms() + self.options.lease_ms
        if until_ms > job.lease_until_ms:
            self._history.step(job, "extend", "running", by=token, lease_until_ms=until_ms)
            self._line.hold(job)

    def _report(self, report: Report) -> LeaseLost | None:
        job = self.guard(report.lease, "report")
        if isinstance(job, LeaseLost):
            return job
        self._history.told(job, report)
        return None

    def _reap(self, job: StoredJob) -> None:
        wanted = job.cancel_requested
        self.contents.put_back(job, "reap")
        if wanted:
            self.contents.finish(job, "cancel", "cancelled")
        elif job.attempt >= job.max_attempts:
            starts = f"{job.attempt} of {job.max_attempts} starts"
            why = f"the lease ran out without an outcome after {starts}"
            self.contents.bury(job, "lease_expired", why)
        else:
            self._line.insert(job)

    def _expire(self, job: StoredJob) -> None:
        why = f"not started within its time to live of {job.ttl_ms} ms"
        self.contents.bury(job, "expired", why, kind="expire")

    def _refuse(
        self, job: StoredJob | None, lease: Lease, operation: str, reason: str
    ) -> LeaseLost:
        token_h = short_hash(lease.token.encode())
        name = self.contents.name
        self._history.rejected(job, lease.job_id, name, token_h=token_h, data=operation)
        return LeaseLost(lease.job_id, reason)
