"""The rules of the reference contract: what every queue of Tenure means, over plain dicts.

There is no I/O here. The clock and the random numbers are arguments, so that a test or a simulation
decides them. SPEC.md has the clauses (M-1 ...). Claims and upkeep scan the unfinished jobs: this
code is written to be read, not to be fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import count
from random import Random, SystemRandom
from typing import Any

import msgspec

from tenure.contracts.memory.machine import MACHINE
from tenure.core.encoding import short_hash
from tenure.core.errors import LeaseLost, UsageError
from tenure.core.job import (
    FULL_RETRY_MS,
    JobEvent,
    JobRecord,
    NewJob,
    Submitted,
    check_job,
    check_key,
    request_hash,
    scoped_key,
)
from tenure.core.journal import JournalEvent
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, OutcomeKind, Verdict, verdict_of
from tenure.core.seam import Counts, Upkeep, WorkerBeat

_CLOSED_MAX = 32  # how many ended leases of one job can still answer a resent settle
_NOT_FOUND = "there is no such job"
_FINAL_STATES = {"complete": "done", "bury": "failed", "cancel": "cancelled"}


class MemoryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one memory queue.

    `depth_max` 0 means no limit. `retry_delay_ms` is the delay of a retry that the store decided on
    (outcome "fail"). `keep_ms` is how long a finished job stays readable.
    """

    lease_ms: int = 15_000
    max_attempts: int = 3
    depth_max: int = 0
    retry_delay_ms: int = 0
    keep_ms: int = 86_400_000
    journal_events_max: int = 1_000_000

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            least = int(name in ("lease_ms", "max_attempts", "journal_events_max"))
            if value < least:
                raise ValueError(f"{name} is at least {least}, not {value}")


class ClaimId(msgspec.Struct, frozen=True):
    """One claim: the instance that calls, one at a time, its number, which rises, and the last
    claim that was answered."""

    instance: str
    number: int
    received: int


@dataclass(slots=True)
class StoredJob:
    """One job with its whole state; `new` is what was submitted, with the defaults filled in.

    `turn` orders the jobs that wait; 0 means that the job is not claimable. `fence` and `ver` only
    rise. `instance` and `claim_number` say which claim handed out the lease; the number is 0 once
    the claimer has the answer. `closed` holds, by fence, how the latest leases ended: a hash of the
    settle and its verdict.
    """

    new: NewJob
    key: str
    request_h: str
    created_ms: int
    state: str = ""
    turn: int = 0
    due_ms: int = 0
    updated_ms: int = 0
    attempt: int = 0
    fence: int = 0
    ver: int = 0
    token: str = ""
    worker_id: str = ""
    lease_until_ms: int = 0
    instance: str = ""
    claim_number: int = 0
    cancel_requested: bool = False
    result: bytes = b""
    error: bytes = b""
    progress: bytes = b""
    closed: dict[int, tuple[str, Verdict]] = field(default_factory=dict)
    events: list[JobEvent] = field(default_factory=list)

    @property
    def expires_ms(self) -> int:
        """When its time to live ends, which counts until the first start (M-6); 0 for never."""
        unstarted = self.state == "waiting" and self.attempt == 0
        return self.created_ms + self.new.ttl_ms if unstarted and self.new.ttl_ms else 0

    @property
    def is_last_attempt(self) -> bool:
        """Whether no further start is left."""
        return self.attempt >= (self.new.max_attempts or 0)

    def fields_of(self, struct: type[msgspec.Struct]) -> dict[str, Any]:
        """The fields that a job and a lease, record or journal event have in common."""
        names = set(struct.__struct_fields__)
        new = {name: getattr(self.new, name) for name in names & set(NewJob.__struct_fields__)}
        return new | {name: getattr(self, name) for name in names & set(self.__slots__)}


class MemoryStore:
    """All jobs of one queue name.

    Every method is part of one atomic step that checks first and writes last: the caller holds the
    lock and has called `begin`. Every change of a job goes through `_step`, which checks `MACHINE`
    and writes the journal event. The rules that a test may break on purpose are methods of their
    own: `guard`, `make_claimable`, `reclaim`, `ran_out` and `replayed`.
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
        self._clock = now_ms
        self._random = random or SystemRandom()
        self.now_ms = now_ms()
        self._unfinished: dict[str, StoredJob] = {}
        self._keys: dict[str, str] = {}
        self._turns = count(1)
        self._claims: dict[str, int] = {}
        self._workers: dict[str, WorkerBeat] = {}
        self._journal: list[JournalEvent] = []
        self._trimmed = 0
        self._totals: Counter[str] = Counter()

    def begin(self) -> None:
        """Begin a new step; everything in it happens at one moment."""
        self.now_ms = self._clock()

    # submit (M-2 to M-6) ------------------------------------------------------------------------

    def submit(self, new: NewJob) -> Submitted:
        """Store a job, or say why not."""
        try:
            payload = _check(new)
        except (UsageError, msgspec.DecodeError) as error:
            return Submitted("", "invalid", str(error))
        key = scoped_key(new.requester, new.idempotency_key) if new.idempotency_key else ""
        # Two submits are the same if they differ in their ids and traces only.
        request_h = request_hash(
            *(new.requester, new.task, payload, new.priority, new.delay_ms),
            *(new.max_attempts, new.ttl_ms, new.gid, new.options),
        )
        known = self.jobs.get(new.job_id) or self.jobs.get(self._keys.get(key, ""))
        if known is not None and known.request_h == request_h:
            return Submitted(known.new.job_id, "replayed")
        if known is not None:
            taken = "job id" if known.new.job_id == new.job_id else "idempotency key"
            return Submitted("", "conflict", f"this {taken} belongs to another request")
        depth = len(self._unfinished)
        if self.options.depth_max and depth >= self.options.depth_max:
            why = f"the queue holds {depth} unfinished jobs, its limit"
            return Submitted("", "full", why, FULL_RETRY_MS)
        job = self._store(new, key, request_h)
        self.make_claimable(job)
        return Submitted(job.new.job_id, "created")

    def _store(self, new: NewJob, key: str, request_h: str) -> StoredJob:
        new = msgspec.structs.replace(
            new,
            job_id=new.job_id or f"{self._random.getrandbits(128):032x}",
            max_attempts=new.max_attempts or self.options.max_attempts,
            ttl_ms=new.ttl_ms or 0,
        )
        job = self.jobs[new.job_id] = StoredJob(new, key, request_h, self.now_ms)
        if key:
            self._keys[key] = new.job_id
        due_ms = self.now_ms + new.delay_ms if new.delay_ms else 0
        event = {"payload_h": short_hash(new.payload)}
        self._step(job, "submit", "waiting", event=event, due_ms=due_ms)
        return job

    def make_claimable(self, job: StoredJob) -> None:
        """Give a job the last turn of its priority; for a new job part of storing it (M-2)."""
        job.turn = next(self._turns)

    # claim (M-7 to M-10) ------------------------------------------------------------------------

    def claim(self, worker_id: str, claim: ClaimId, limit: int) -> list[Lease]:
        """Hand out the leases of a lost answer again, then lease the first waiting jobs.

        A claim changes the store. So a claimer that lost the answer must get the same leases again,
        and a claim that the network delayed must take none for a caller that has given up.
        """
        if claim.number <= self._claims.get(claim.instance, 0):
            return []
        self._claims[claim.instance] = claim.number
        self._note_worker(worker_id)
        jobs = self._lost_answers(claim)[:limit]
        for job in jobs:
            self._extend_lease(job, job.token)
        if not self.paused and len(jobs) < limit:
            self._do_what_is_due()
            for job in self._first_waiting(limit - len(jobs)):
                self._lease(job, worker_id)
                jobs.append(job)
        for job in jobs:
            job.instance, job.claim_number = claim.instance, claim.number
        return [self._lease_of(job) for job in jobs]

    def _lost_answers(self, claim: ClaimId) -> list[StoredJob]:
        """Leases of earlier claims whose answers the claimer did not receive."""
        running = (job for job in self._unfinished.values() if job.state == "running")
        held = [job for job in running if job.instance == claim.instance and job.claim_number]
        for job in held:
            if job.claim_number == claim.received:
                job.claim_number = 0
        return [job for job in held if job.claim_number]

    def _first_waiting(self, limit: int) -> list[StoredJob]:
        waiting = (job for job in self._unfinished.values() if job.state == "waiting")
        ready = (job for job in waiting if job.turn and not job.due_ms)
        return nsmallest(limit, ready, key=lambda job: (job.new.priority, job.turn))

    def _lease(self, job: StoredJob, worker_id: str) -> None:
        self._step(
            job,
            "claim",
            "running",
            attempt=job.attempt + 1,
            fence=job.fence + 1,
            token=f"{self._random.getrandbits(64):016x}",
            worker_id=worker_id,
            lease_until_ms=self.now_ms + self.options.lease_ms,
        )

    def _lease_of(self, job: StoredJob) -> Lease:
        """The lease for its holder; `lease_ms` is what is left of it now."""
        left_ms = job.lease_until_ms - self.now_ms
        return Lease(queue=self.name, lease_ms=left_ms, **job.fields_of(Lease))

    def record(self, job: StoredJob) -> JobRecord:
        """The job for the ledger."""
        extra = {"cancel_requested": True} if job.cancel_requested else {}
        fields = job.fields_of(JobRecord)
        return JobRecord(contract="memory", queue=self.name, extra=extra, **fields)

    def forget(self, instance: str) -> None:
        """Forget a closed instance, which will not ask for a lost answer any more."""
        self._claims.pop(instance, None)

    def _note_worker(self, worker_id: str, slots: int = 0) -> None:
        known = self._workers.get(worker_id)
        slots = slots or (known.slots if known else 0)
        self._workers[worker_id] = WorkerBeat(worker_id, self.now_ms, slots)

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
            seen = {"from_state": job.state, "to_state": job.state, "task": job.new.task}
            seen |= {"fence": job.fence, "prev_fence": job.fence, "attempt": job.attempt}
        token_h = short_hash(lease.token.encode())
        self._write("reject", job_id=lease.job_id, token_h=token_h, data=operation, **seen)
        return LeaseLost(lease.job_id, reason)

    def extend(self, lease: Lease) -> Lease | LeaseLost:
        """Keep a lease; writes only when less than two thirds of it are left (M-12)."""
        job = self.guard(lease, "extend")
        if isinstance(job, LeaseLost):
            return job
        if 3 * (job.lease_until_ms - self.now_ms) < 2 * self.options.lease_ms:
            self._extend_lease(job, lease.token)
        return self._lease_of(job)

    def _extend_lease(self, job: StoredJob, token: str) -> None:
        until_ms = self.now_ms + self.options.lease_ms
        if until_ms > job.lease_until_ms:
            self._step(job, "extend", "running", by=token, lease_until_ms=until_ms)

    def report(self, report: Report) -> LeaseLost | None:
        """Add to the job's own events while the lease is held (M-14)."""
        job = self.guard(report.lease, "report")
        if isinstance(job, LeaseLost):
            return job
        by, event = report.lease.token, {"data": report.type}
        progress = report.progress or job.progress
        self._step(job, "report", "running", by=by, event=event, progress=progress)
        self._add_event(job, report.type, report.step, report.data)
        return None

    # settle (M-15 to M-18) ----------------------------------------------------------------------

    def settle(self, outcome: Outcome) -> Verdict:
        """End a lease; a resent outcome gets the verdict it got before."""
        lease, failure = outcome.lease, outcome.failure
        reason = [failure.code, failure.message] if failure else None
        settle_h = request_hash(
            lease.token, outcome.kind, short_hash(outcome.result), reason, outcome.delay_ms
        )
        earlier = self.replayed(outcome, settle_h)
        if earlier is not None:
            return earlier
        job = self.guard(lease, "settle")
        if isinstance(job, LeaseLost):
            return job
        verdict = self._apply(job, outcome)
        job.closed[lease.fence] = settle_h, verdict
        if len(job.closed) > _CLOSED_MAX:
            del job.closed[min(job.closed)]
        return verdict

    def replayed(self, outcome: Outcome, settle_h: str) -> Verdict | None:
        """The verdict that this lease already got for this same outcome, if any (M-17)."""
        job = self.jobs.get(outcome.lease.job_id)
        closed = job.closed.get(outcome.lease.fence) if job is not None else None
        return closed[1] if closed is not None and closed[0] == settle_h else None

    def _apply(self, job: StoredJob, outcome: Outcome) -> Verdict:
        """End the lease of a running job as the outcome asks, as far as the rules allow."""
        kind, failure = _decide(job, outcome), outcome.failure
        delay_ms = outcome.delay_ms
        if outcome.kind == "fail":
            delay_ms = int(job.new.options.get("retry_delay_ms", self.options.retry_delay_ms))
        event: dict[str, Any] = {}
        changes: dict[str, Any] = {}
        if kind == "complete":
            event["result_h"] = short_hash(outcome.result)
            changes["result"] = outcome.result
        if kind in ("retry", "bury", "cancel"):
            event["error_code"] = failure.code if failure else ""
            changes["error"] = msgspec.json.encode(failure) if failure else b""
        if kind in ("snooze", "release"):
            changes["attempt"] = job.attempt - 1
        if kind in ("retry", "snooze"):
            changes["due_ms"] = self.now_ms + delay_ms if delay_ms > 0 else 0
            changes["turn"] = next(self._turns)  # a released job keeps its turn
        state = _FINAL_STATES.get(kind, "waiting")
        self._step(job, kind, state, by=outcome.lease.token, event=event, **changes)
        return verdict_of(kind, job.due_ms)

    # time ---------------------------------------------------------------------------------------

    def upkeep(self, worker_id: str = "", slots: int = 0) -> Upkeep:
        """Promote, reclaim, expire and trim; changes nothing that is not due (M-23)."""
        if slots:
            self._note_worker(worker_id, slots)
        before = self._totals.copy()
        promoted = self._do_what_is_due()
        since = self._totals - before
        return Upkeep(
            promoted=promoted,
            reclaimed=since["reap"],
            buried=since["bury"],
            expired=since["expire"],
            trimmed=self._trim(),
        )

    def wait_ms(self) -> int:
        """How long time alone makes no job claimable, at most a lease length.

        A lease that is taken from now on ends later than that.
        """
        jobs = [] if self.paused else self._unfinished.values()
        times = (job.lease_until_ms or job.due_ms for job in jobs)
        left_ms = min((ms for ms in times if ms), default=2**53) - self.now_ms
        return min(max(left_ms, 1), self.options.lease_ms)

    def _do_what_is_due(self) -> int:
        """Reclaim, expire and promote; returns how many delayed jobs were promoted."""
        due: list[StoredJob] = []
        for job in list(self._unfinished.values()):
            if job.state == "running":
                if self.ran_out(job):
                    self.reclaim(job)
            elif 0 < job.expires_ms <= self.now_ms:
                why = f"not started within its time to live of {job.new.ttl_ms} ms"
                self._bury(job, "expire", "expired", why)
            elif job.turn and 0 < job.due_ms <= self.now_ms:
                due.append(job)
        for job in sorted(due, key=lambda job: job.due_ms):
            job.due_ms, job.turn = 0, next(self._turns)
        return len(due)

    def ran_out(self, job: StoredJob) -> bool:
        """Whether the lease of a running job is over."""
        return job.lease_until_ms <= self.now_ms

    def reclaim(self, job: StoredJob) -> None:
        """Take back a lease that ran out; the job keeps its turn (M-13)."""
        self._step(job, "reap", "waiting")
        if job.cancel_requested:
            self._step(job, "cancel", "cancelled")
        elif job.is_last_attempt:
            starts = f"{job.attempt} of {job.new.max_attempts} starts"
            why = f"the lease ran out without an outcome after {starts}"
            self._bury(job, "bury", "lease_expired", why)

    def _trim(self) -> int:
        """Remove what finished longer than `keep_ms` ago, and the oldest journal events."""
        before_ms = self.now_ms - self.options.keep_ms
        finished = (job for job in self.jobs.values() if job.state in MACHINE.final)
        old = [job for job in finished if job.updated_ms < before_ms]
        for job in old:
            self._remove(job, "kept long enough")
        extra = max(len(self._journal) - self.options.journal_events_max, 0)
        del self._journal[:extra]
        self._trimmed += extra
        return len(old) + extra

    # operators (M-10, M-19 to M-21) -------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Stop or resume handing out leases."""
        if self.paused != paused:
            self.paused = paused
            self._write("pause" if paused else "resume")

    def retry(self, job_id: str) -> str:
        """Send a finished job back with all its attempts; the fence goes on rising."""
        job = self.jobs.get(job_id)
        if job is None:
            return _NOT_FOUND
        if job.state not in MACHINE.final:
            return f"the job is {job.state}; only a finished job can be sent back"
        fresh: dict[str, Any] = {"attempt": 0, "result": b"", "error": b"", "progress": b""}
        self._step(job, "reopen", "waiting", turn=next(self._turns), **fresh)
        return "ok"

    def cancel(self, job_id: str) -> str:
        """End a waiting job now; mark a running one for its holder, which learns it at extend."""
        job = self.jobs.get(job_id)
        if job is None:
            return _NOT_FOUND
        if job.state == "running":
            job.cancel_requested = True
            return "requested"
        if job.state != "waiting":
            return f"the job is {job.state} already"
        self._step(job, "cancel", "cancelled")
        return "ok"

    def remove(self, job_id: str) -> str:
        """Delete a job that is not running."""
        job = self.jobs.get(job_id)
        if job is None:
            return _NOT_FOUND
        if job.state == "running":
            return "the job is running; cancel it first"
        self._remove(job, "by an operator")
        return "ok"

    def counts(self) -> Counts:
        """Depths by state, how often each step happened, and how many workers are alive."""
        states = dict.fromkeys(MACHINE.states, 0) | Counter(job.state for job in self.jobs.values())
        waiting_ms = (job.created_ms for job in self.jobs.values() if job.state == "waiting")
        return Counts(
            states=states,
            totals=dict(self._totals),
            paused=self.paused,
            workers=len(self.workers()),
            oldest_waiting_ms=self.now_ms - min(waiting_ms, default=self.now_ms),
        )

    def workers(self) -> list[WorkerBeat]:
        """The workers that claimed or reported their slots lately."""
        silent_ms = self.now_ms - 2 * self.options.lease_ms
        return [beat for beat in self._workers.values() if beat.last_ms >= silent_ms]

    # steps, each of them one journal event ------------------------------------------------------

    def _bury(self, job: StoredJob, kind: str, code: str, message: str) -> None:
        """End a job as failed by the store's own decision, with a reason that the ledger shows."""
        error = msgspec.json.encode({"code": code, "message": message, "retryable": False})
        self._step(job, kind, "failed", event={"error_code": code}, error=error)

    def _remove(self, job: StoredJob, why: str) -> None:
        self._step(job, "remove", "", event={"data": why})
        del self.jobs[job.new.job_id]
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
        **changes: Any,
    ) -> None:
        """Move a job: check the table, change its fields, write the event (M-22).

        A step out of `running` ends the lease. `by` is the token that the caller showed, `event`
        has fields that only the event has, `changes` those of the job.
        """
        if job.state and to_state and to_state != job.state:
            MACHINE.require(job.state, to_state, reopening=kind == "reopen")
        from_state, prev_fence, prev_until_ms = job.state, job.fence, job.lease_until_ms
        # A step under a lease names its holder, any other step none.
        token, worker_id = by or job.token, job.worker_id
        if to_state != "running":
            job.token, job.lease_until_ms, job.due_ms = "", 0, 0
        if to_state == "waiting":
            job.worker_id = ""
        for name, value in changes.items():
            setattr(job, name, value)
        token, worker_id = token or job.token, job.worker_id or worker_id
        job.state, job.updated_ms, job.ver = to_state, self.now_ms, job.ver + 1
        if to_state in ("waiting", "running"):
            self._unfinished[job.new.job_id] = job
        else:
            self._unfinished.pop(job.new.job_id, None)
            job.cancel_requested = False
        fields = job.fields_of(JournalEvent) | (event or {})
        fields |= {"from_state": from_state, "to_state": to_state, "prev_fence": prev_fence}
        fields |= {"prev_lease_until_ms": prev_until_ms, "worker_id": worker_id if token else ""}
        self._write(kind, token_h=short_hash(token.encode()) if token else "", **fields)
        if kind not in ("extend", "report", "remove"):
            self._add_event(job, job.state, kind, b'{"attempt":%d}' % job.attempt)

    def _add_event(self, job: StoredJob, kind: str, step: str, data: bytes) -> None:
        """Add to the job's own events."""
        event_id = str(self.journal_length)
        event = JobEvent(event_id=event_id, type=kind, ts_ms=self.now_ms, step=step, data=data)
        job.events.append(event)

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
        fields |= {"contract": "memory", "queue": self.name, "ts_ms": self.now_ms}
        seq = str(self.journal_length + 1)
        self._journal.append(JournalEvent(seq=seq, job_id=job_id, type=kind, **fields))


def _check(new: NewJob) -> Any:
    """Decode the payload; raises for a job that no store could take (M-5)."""
    check_job(new)
    if new.ttl_ms is not None and new.ttl_ms <= 0:
        raise UsageError(f"ttl_ms is positive or left out, not {new.ttl_ms}")
    if new.idempotency_key:
        check_key(new.idempotency_key)
    if unknown := ", ".join(new.options.keys() - {"retry_delay_ms"}):
        raise UsageError(f"no such job option: {unknown}; there is retry_delay_ms")
    return msgspec.json.decode(new.payload)


def _decide(job: StoredJob, outcome: Outcome) -> OutcomeKind:
    """What becomes of an outcome: `fail` and `retry` bury a job that has no attempt left."""
    kind, failure = outcome.kind, outcome.failure
    if job.cancel_requested and kind in ("fail", "retry", "snooze", "release"):
        return "cancel"  # M-18: a job that is to be cancelled does not wait again
    if kind in ("fail", "retry"):
        final = kind == "fail" and failure is not None and not failure.retryable
        return "bury" if final or job.is_last_attempt else "retry"
    return kind
