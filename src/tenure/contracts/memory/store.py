"""The rules of the reference contract: what every queue of Tenure means, over plain dicts.

No I/O, no clock and no randomness of its own: `now_ms` and `random` come in, so that a test or a
simulation decides them. SPEC.md has the clauses (M-1 ...).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from random import Random, SystemRandom
from typing import Any, assert_never

import msgspec

from tenure.contracts.memory.job import (
    EVENT_FIELDS,
    MACHINE,
    ClaimId,
    MemoryOptions,
    StoredJob,
    invalid,
    request_h_of,
)
from tenure.core.errors import LeaseLost
from tenure.core.job import (
    FULL_RETRY_MS,
    JobEvent,
    JobRecord,
    NewJob,
    Submitted,
    request_hash,
    scoped_key,
    short_hash,
)
from tenure.core.journal import JournalEvent
from tenure.core.lease import Lease, Report
from tenure.core.outcome import BURIED, CANCELLED, COMPLETED, RELEASED, Outcome, Retried, Verdict
from tenure.core.seam import Counts, Page, Query, Upkeep, WorkerBeat

_CLOSED_MAX = 32  # how many ended leases of one job can still answer a resent settle
_WORKER_SILENT_LEASES = 2
_UNKNOWN = "there is no such job"


class MemoryStore:
    """All jobs of one queue name.

    Every method is part of one atomic step (the caller holds the lock and has called `begin`) that
    checks first and writes last. Every change of a job goes through `_step`, which asks the table
    `MACHINE` and writes the journal event. The rules that a test may break on purpose are
    methods: `guard`, `place`, `reclaim`, `ran_out` and `replayed`.
    """

    def __init__(
        self,
        name: str,
        options: MemoryOptions,
        *,
        now_ms: Callable[[], int],
        random: Random | None = None,
    ) -> None:
        self.name = name
        self.options = options
        self.jobs: dict[str, StoredJob] = {}
        self.paused = False
        self.arrivals = 0  # counts what became claimable, for those who wait
        self._clock = now_ms
        self._random = random or SystemRandom()
        self._now_ms = now_ms()
        self._depth = 0
        self._keys: dict[str, str] = {}
        self._workers: dict[str, WorkerBeat] = {}
        # Who is next, and what time alone changes. Both heaps forget lazily: an entry counts only
        # while the job still is as the entry says, so that no step has to search them.
        self._ready: list[tuple[int, int, str]] = []
        self._timers: list[tuple[int, int, str, int]] = []
        self._places = count(1)
        self._timer_ids = count()
        self._finished: deque[tuple[int, int, str]] = deque()
        self._journal: list[JournalEvent] = []
        self._trimmed = 0
        self._totals: Counter[str] = Counter()
        self._claims: dict[str, int] = {}
        self._unreceived: dict[str, dict[tuple[str, int], int]] = {}

    def now_ms(self) -> int:
        """The time of the current step: it stands still until the next `begin`."""
        return self._now_ms

    def begin(self) -> None:
        """A new step begins; everything in it happens at one moment."""
        self._now_ms = self._clock()

    # submit (M-2 to M-6) ------------------------------------------------------------------------

    def submit(self, new: NewJob) -> Submitted:
        """Store a job, or say why not."""
        if problem := invalid(new):
            return Submitted("", "invalid", problem)
        key = scoped_key(new.requester, new.idempotency_key) if new.idempotency_key else ""
        request_h = request_h_of(new)
        known = self.jobs.get(new.job_id) or self.jobs.get(self._keys.get(key, ""))
        if known is not None and known.request_h == request_h:
            return Submitted(known.job_id, "replayed")
        if known is not None:
            named = "job id" if known.job_id == new.job_id else "idempotency key"
            return Submitted("", "conflict", f"this {named} belongs to another request")
        if self.options.depth_max and self._depth >= self.options.depth_max:
            why = f"the queue holds {self._depth} unfinished jobs, its limit"
            return Submitted("", "full", why, FULL_RETRY_MS)
        job = self._store(new, request_h, key)
        self.place(job)
        return Submitted(job.job_id, "created")

    def _store(self, new: NewJob, request_h: str, key: str) -> StoredJob:
        job = StoredJob(
            job_id=new.job_id or f"{self._random.getrandbits(128):032x}",
            queue=self.name,
            task=new.task,
            payload=new.payload,
            request_h=request_h,
            created_ms=self._now_ms,
            max_attempts=new.max_attempts or self.options.max_attempts,
            requester=new.requester,
            key=key,
            priority=new.priority,
            gid=new.gid,
            trace=new.trace,
            ttl_ms=new.ttl_ms or 0,
            retry_delay_ms=int(new.options.get("retry_delay_ms", self.options.retry_delay_ms)),
            due_ms=self._now_ms + new.delay_ms if new.delay_ms else 0,
        )
        self.jobs[job.job_id] = job
        if key:
            self._keys[key] = job.job_id
        if job.ttl_ms:
            self._set_timer(job, job.created_ms + job.ttl_ms)
        self._depth += 1
        self._step(job, "submit", "waiting", event={"payload_h": short_hash(job.payload)})
        return job

    # claim (M-7 to M-10) ------------------------------------------------------------------------

    def claim(self, worker_id: str, claim: ClaimId, limit: int) -> list[Lease]:
        """Hand out again what a lost answer took, then lease the first waiting jobs.

        A claim changes the store, so a claimer that lost the answer must get the same leases again,
        and a claim that the network kept back must not take leases for a caller that has given up.
        """
        if claim.number <= self._claims.get(claim.instance, 0):
            return []
        self._claims[claim.instance] = claim.number
        self._heard(worker_id)
        taken = self._lost_answers(claim, limit)
        for job in taken:
            self._prolong(job, job.token)
        if not self.paused and len(taken) < limit:
            self._elapse()
            while len(taken) < limit and (next_job := self._next()) is not None:
                self._lease(next_job, worker_id)
                taken.append(next_job)
        sent = self._unreceived[claim.instance]
        sent.update({(job.job_id, job.fence): claim.number for job in taken})
        return [job.lease(self._now_ms) for job in taken]

    def _lost_answers(self, claim: ClaimId, limit: int) -> list[StoredJob]:
        """Leases of earlier claims that never arrived and are still held."""
        sent = self._unreceived.setdefault(claim.instance, {})
        found: list[StoredJob] = []
        for (job_id, fence), number in list(sent.items()):
            job = self.jobs.get(job_id)
            held = job is not None and job.state == "running" and job.fence == fence
            if number == claim.received or job is None or not held:
                del sent[job_id, fence]
            elif len(found) < limit:
                found.append(job)
        return found

    def _next(self) -> StoredJob | None:
        while self._ready:
            _, place, job_id = heappop(self._ready)
            job = self.jobs.get(job_id)
            if job is None or (job.state, job.place, job.due_ms) != ("waiting", place, 0):
                continue
            if not job.outlived(self._now_ms):
                return job
            self._expire(job)
        return None

    def _lease(self, job: StoredJob, worker_id: str) -> None:
        self._step(
            job,
            "claim",
            "running",
            attempt=job.attempt + 1,
            fence=job.fence + 1,
            token=f"{self._random.getrandbits(64):016x}",
            worker_id=worker_id,
            lease_until_ms=self._now_ms + self.options.lease_ms,
        )
        self._set_timer(job, job.lease_until_ms)

    def forget(self, instance: str) -> None:
        """The instance is closed and will not ask for a lost answer any more."""
        self._claims.pop(instance, None)
        self._unreceived.pop(instance, None)

    def _heard(self, worker_id: str, slots: int = 0) -> None:
        known = self._workers.get(worker_id)
        slots = slots or (known.slots if known else 0)
        self._workers[worker_id] = WorkerBeat(worker_id, self._now_ms, slots)

    # lease (M-11 to M-14) -----------------------------------------------------------------------

    def guard(self, lease: Lease, operation: str) -> StoredJob | LeaseLost:
        """The job, if this very lease is the one that holds it (M-11)."""
        job = self.jobs.get(lease.job_id)
        if job is None:
            reason = "there is no such job (any more)"
        elif job.state != "running":
            reason = f"the lease has ended, the job is {job.state}"
        elif (job.fence, job.token) != (lease.fence, lease.token):
            reason = f"fence {lease.fence} is stale, the job is leased with fence {job.fence}"
        else:
            return job
        seen: dict[str, Any] = {}
        if job is not None:
            seen = {"from_state": job.state, "to_state": job.state, "task": job.task}
            seen |= {"fence": job.fence, "prev_fence": job.fence, "attempt": job.attempt}
        token_h = short_hash(lease.token.encode())
        self._write("reject", job_id=lease.job_id, token_h=token_h, data=operation, **seen)
        return LeaseLost(lease.job_id, reason)

    def extend(self, lease: Lease) -> Lease | LeaseLost:
        """Keep a lease; writes only when less than two thirds of it are left (M-12)."""
        job = self.guard(lease, "extend")
        if isinstance(job, LeaseLost):
            return job
        if 3 * (job.lease_until_ms - self._now_ms) < 2 * self.options.lease_ms:
            self._prolong(job, lease.token)
        return job.lease(self._now_ms)

    def _prolong(self, job: StoredJob, token: str) -> None:
        until_ms = self._now_ms + self.options.lease_ms
        if until_ms > job.lease_until_ms:
            self._step(job, "extend", "running", by=token, lease_until_ms=until_ms)
            self._set_timer(job, until_ms)

    def report(self, report: Report) -> LeaseLost | None:
        """Add news to the job's own events while the lease is held (M-14)."""
        job = self.guard(report.lease, "report")
        if isinstance(job, LeaseLost):
            return job
        progress, event = report.progress or job.progress, {"data": report.type}
        self._step(job, "report", "running", by=report.lease.token, event=event, progress=progress)
        self._tell(job, report.type, report.step, report.data)
        return None

    # settle (M-15 to M-18) ----------------------------------------------------------------------

    def replayed(self, outcome: Outcome, settle_h: str) -> Verdict | None:
        """The verdict that this lease already got for this same outcome, if any (M-17)."""
        job = self.jobs.get(outcome.lease.job_id)
        closed = job.closed.get(outcome.lease.fence) if job is not None else None
        return closed[1] if closed is not None and closed[0] == settle_h else None

    def settle(self, outcome: Outcome) -> Verdict:
        """End a lease; a resent outcome gets the verdict it got before."""
        lease, failure = outcome.lease, outcome.failure
        what = [failure.code, failure.message] if failure else None
        settle_h = request_hash(
            lease.token, outcome.kind, short_hash(outcome.result), what, outcome.delay_ms
        )
        again = self.replayed(outcome, settle_h)
        if again is not None:
            return again
        job = self.guard(lease, "settle")
        if isinstance(job, LeaseLost):
            return job
        verdict = self._apply(job, outcome)
        job.closed[lease.fence] = settle_h, verdict
        if len(job.closed) > _CLOSED_MAX:
            del job.closed[min(job.closed)]
        return verdict

    def _apply(self, job: StoredJob, outcome: Outcome) -> Verdict:
        """End the lease of a running job as the outcome asks, as far as the rules allow."""
        kind, by, failure = outcome.kind, outcome.lease.token, outcome.failure
        error = msgspec.json.encode(failure) if failure else b""
        code = {"error_code": failure.code if failure else ""}
        if job.cancel_requested and kind in ("fail", "retry", "snooze", "release"):
            kind = "cancel"  # M-18: a job that is to be cancelled does not wait again
        if kind in ("fail", "retry"):
            final = kind == "fail" and failure is not None and not failure.retryable
            if final or job.attempt >= job.max_attempts:
                kind = "bury"
        match kind:
            case "complete":
                event = {"result_h": short_hash(outcome.result)}
                self._finish(job, "complete", "done", event, by=by, result=outcome.result)
                return COMPLETED
            case "bury":
                self._finish(job, "bury", "failed", code, by=by, error=error)
                return BURIED
            case "cancel":
                self._finish(job, "cancel", "cancelled", code, by=by, error=error)
                return CANCELLED
            case "fail" | "retry":
                delay_ms = job.retry_delay_ms if kind == "fail" else outcome.delay_ms
                return self._wait_again(job, "retry", delay_ms, code, by=by, error=error)
            case "snooze":
                spent = job.attempt - 1
                return self._wait_again(job, "snooze", outcome.delay_ms, {}, by=by, attempt=spent)
            case "release":  # to its old turn; the fence stays, so the old lease stays stale
                self._put_back(job, "release", {}, by=by, attempt=job.attempt - 1)
                self._line_up(job)
                return RELEASED
            case _:
                assert_never(kind)

    def _wait_again(
        self, job: StoredJob, kind: str, delay_ms: int, event: dict[str, Any], **left: Any
    ) -> Verdict:
        due_ms = self._now_ms + delay_ms if delay_ms > 0 else 0
        self._put_back(job, kind, event, due_ms=due_ms, **left)
        self._append(job)
        return Retried(due_ms)

    # time ---------------------------------------------------------------------------------------

    def upkeep(self, worker_id: str = "", slots: int = 0) -> Upkeep:
        """Promote, reclaim, expire and trim; changes nothing that is not due (M-23)."""
        if slots:
            self._heard(worker_id, slots)
        before = self._totals.copy()
        promoted = self._elapse()
        since = self._totals - before
        return Upkeep(
            promoted=promoted,
            reclaimed=since["reap"],
            buried=since["bury"],
            expired=since["expire"],
            trimmed=self._trim(),
        )

    def next_change_ms(self) -> int | None:
        """When time alone may make a job claimable; None when only a call can."""
        return None if self.paused or not self._timers else self._timers[0][0]

    def _set_timer(self, job: StoredJob, at_ms: int) -> None:
        heappush(self._timers, (at_ms, next(self._timer_ids), job.job_id, job.fence))

    def _elapse(self) -> int:
        """Do what became due since the last time; returns how many delayed jobs were promoted."""
        promoted = 0
        while self._timers and self._timers[0][0] <= self._now_ms:
            _, _, job_id, fence = heappop(self._timers)
            job = self.jobs.get(job_id)
            if job is None:
                continue
            if job.state == "running" and job.fence == fence:
                self.reclaim(job)
            elif job.outlived(self._now_ms):
                self._expire(job)
            elif job.state == "waiting" and 0 < job.due_ms <= self._now_ms:
                job.due_ms = 0
                self._append(job)
                promoted += 1
        return promoted

    def reclaim(self, job: StoredJob) -> None:
        """Take back a lease that ran out (M-13)."""
        if not self.ran_out(job):
            return
        wanted = job.cancel_requested
        self._put_back(job, "reap", {})
        if wanted:
            self._finish(job, "cancel", "cancelled")
        elif job.attempt >= job.max_attempts:
            starts = f"{job.attempt} of {job.max_attempts} starts"
            why = f"the lease ran out without an outcome after {starts}"
            self._bury(job, "bury", "lease_expired", why)
        else:
            self._line_up(job)

    def ran_out(self, job: StoredJob) -> bool:
        """Whether the lease is over now, counting every extension since its timer was set."""
        return job.lease_until_ms <= self._now_ms

    def _expire(self, job: StoredJob) -> None:
        why = f"not started within its time to live of {job.ttl_ms} ms"
        self._bury(job, "expire", "expired", why)

    def _trim(self) -> int:
        """Remove what finished longer than `keep_ms` ago, and the oldest journal events."""
        before_ms, trimmed = self._now_ms - self.options.keep_ms, 0
        while self._finished and self._finished[0][0] < before_ms:
            _, ver, job_id = self._finished.popleft()
            job = self.jobs.get(job_id)
            if job is not None and job.ver == ver:  # else it was reopened or removed since
                self._remove(job, "kept long enough")
                trimmed += 1
        extra = max(len(self._journal) - self.options.journal_events_max, 0)
        del self._journal[:extra]
        self._trimmed += extra
        return trimmed + extra

    # operators (M-10, M-19 to M-21) -------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Stop or begin again to hand out leases."""
        if self.paused != paused:
            self.paused = paused
            self._write("pause" if paused else "resume")

    def retry(self, job_id: str) -> str:
        """Send a finished job back with all its attempts; the fence goes on rising."""
        job = self.jobs.get(job_id)
        if job is None:
            return _UNKNOWN
        if job.state not in MACHINE.final:
            return f"the job is {job.state}; only a finished job can be sent back"
        fresh: dict[str, Any] = {"attempt": 0, "result": b"", "error": b"", "progress": b""}
        self._step(job, "reopen", "waiting", worker_id="", **fresh)
        self._depth += 1
        self._append(job)
        return "ok"

    def cancel(self, job_id: str) -> str:
        """End a waiting job now; mark a running one for its holder, who hears of it at extend."""
        job = self.jobs.get(job_id)
        if job is None:
            return _UNKNOWN
        if job.state == "running":
            job.cancel_requested = True
            return "requested"
        if job.state != "waiting":
            return f"the job is {job.state} already"
        self._finish(job, "cancel", "cancelled")
        return "ok"

    def remove(self, job_id: str) -> str:
        """Delete a job that is not running."""
        job = self.jobs.get(job_id)
        if job is None:
            return _UNKNOWN
        if job.state == "running":
            return "the job is running; cancel it first"
        self._remove(job, "by an operator")
        return "ok"

    def find(self, query: Query) -> Page:
        """Jobs newest first; a page ends at `limit` and goes on after its last job."""
        newest = reversed(self.jobs.values())
        if query.after:
            if query.after not in self.jobs:
                return Page([])
            next(job for job in newest if job.job_id == query.after)
        records: list[JobRecord] = []
        for job in newest:
            in_state = not query.states or job.state in query.states
            if in_state and (not query.task or job.task == query.task):
                if len(records) == query.limit:
                    return Page(records, records[-1].job_id)
                records.append(job.record())
        return Page(records)

    def counts(self) -> Counts:
        """Depths by state, how often each step happened, and who asked for work lately."""
        states = dict.fromkeys(MACHINE.states, 0) | Counter(job.state for job in self.jobs.values())
        waiting_ms = (job.created_ms for job in self.jobs.values() if job.state == "waiting")
        return Counts(
            states=states,
            totals=dict(self._totals),
            paused=self.paused,
            workers=len(self.workers()),
            oldest_waiting_ms=self._now_ms - min(waiting_ms, default=self._now_ms),
        )

    def workers(self) -> list[WorkerBeat]:
        """The workers that asked for work lately."""
        silent_ms = self._now_ms - _WORKER_SILENT_LEASES * self.options.lease_ms
        return [beat for beat in self._workers.values() if beat.last_ms >= silent_ms]

    # steps, each of them one journal event ------------------------------------------------------

    def place(self, job: StoredJob) -> None:
        """Make a stored job claimable: part of the same step as storing it (M-2)."""
        self._append(job)

    def _append(self, job: StoredJob) -> None:
        """Put a job behind all others of its priority, or aside until it is due."""
        job.place = next(self._places)
        self._line_up(job)

    def _line_up(self, job: StoredJob) -> None:
        """Put a job where its `place` says: a released or reclaimed job keeps its turn."""
        self.arrivals += 1
        if job.due_ms:
            self._set_timer(job, job.due_ms)
        else:
            heappush(self._ready, (job.priority, job.place, job.job_id))

    def _put_back(self, job: StoredJob, kind: str, event: dict[str, Any], **left: Any) -> None:
        """Close the lease of a running job, which waits again; its turn is the caller's choice."""
        over: dict[str, Any] = {"token": "", "worker_id": "", "lease_until_ms": 0, "due_ms": 0}
        self._step(job, kind, "waiting", event=event, **(over | left))

    def _finish(
        self,
        job: StoredJob,
        kind: str,
        state: str,
        event: dict[str, Any] | None = None,
        **left: Any,
    ) -> None:
        """End a job for good, whether it was leased or waiting."""
        left |= {"token": "", "lease_until_ms": 0, "due_ms": 0, "cancel_requested": False}
        self._step(job, kind, state, event=event, **left)
        self._depth -= 1
        self._finished.append((job.updated_ms, job.ver, job.job_id))

    def _bury(self, job: StoredJob, kind: str, code: str, message: str) -> None:
        """End a job as failed by the store's own decision, with a reason that the ledger shows."""
        error = msgspec.json.encode({"code": code, "message": message, "retryable": False})
        self._finish(job, kind, "failed", {"error_code": code}, error=error)

    def _remove(self, job: StoredJob, why: str) -> None:
        if job.state == "waiting":
            self._depth -= 1
        self._step(job, "remove", "", event={"data": why})
        del self.jobs[job.job_id]
        if job.key:
            self._keys.pop(job.key, None)

    def _step(
        self,
        job: StoredJob,
        kind: str,
        to_state: str,
        *,
        by: str = "",
        event: dict[str, Any] | None = None,
        **left: Any,
    ) -> None:
        """Move a job: check the table, change the fields that `left` names, write the event (M-22).

        `by` is the token shown by the caller. `event` holds fields that only the event has.
        """
        if job.state and to_state and to_state != job.state:
            MACHINE.require(job.state, to_state, reopening=kind == "reopen")
        from_state, prev_fence, prev_until_ms = job.state, job.fence, job.lease_until_ms
        # A step under a lease names its holder, any other step none.
        token, worker_id = by or job.token, job.worker_id
        for name, value in left.items():
            setattr(job, name, value)
        token, worker_id = token or job.token, job.worker_id or worker_id
        job.state, job.updated_ms, job.ver = to_state, self._now_ms, job.ver + 1
        shown = {name: getattr(job, name) for name in EVENT_FIELDS}
        shown |= {"from_state": from_state, "to_state": to_state, "prev_fence": prev_fence}
        shown |= {"prev_lease_until_ms": prev_until_ms, "worker_id": worker_id if token else ""}
        token_h = short_hash(token.encode()) if token else ""
        self._write(kind, token_h=token_h, **shown, **(event or {}))
        if kind not in ("extend", "report", "remove"):
            self._tell(job, job.state, kind, b'{"attempt":%d}' % job.attempt)

    def _tell(self, job: StoredJob, kind: str, step: str, data: bytes) -> None:
        """Add to the job's own events."""
        event_id = str(self.journal_length)
        told = JobEvent(event_id=event_id, type=kind, ts_ms=self._now_ms, step=step, data=data)
        job.events.append(told)

    @property
    def journal_length(self) -> int:
        """How many events were written; positions are counted from 1."""
        return self._trimmed + len(self._journal)

    def read_journal(self, after: str, limit: int) -> list[JournalEvent]:
        """Events after a position; a position that was trimmed away continues at the oldest."""
        start = max(int(after or 0) - self._trimmed, 0)
        return self._journal[start : start + max(limit, 0)]

    def _write(self, kind: str, *, job_id: str = "", **fields: Any) -> None:
        self._totals[kind] += 1
        self._journal.append(
            JournalEvent(
                seq=str(self.journal_length + 1),
                contract="memory",
                queue=self.name,
                job_id=job_id,
                type=kind,
                ts_ms=self._now_ms,
                **fields,
            )
        )
