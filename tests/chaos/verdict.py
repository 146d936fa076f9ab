"""The history checker: what a journal, and those who watched, say about the promises.

    verdict = check(events, observations=seen, faults=injected, snapshot=scan)
    assert verdict.ok, verdict

Three logs go in. A, the journal, is written in the same step as each transition, so it cannot
disagree with the store. B, the observations, is what clients saw: "ok", "fail", or "info" for an
answer that never came, which may mean either. C, the faults, is what a test did to the system.

The numbers name the invariants:

    I1   no loss: an acknowledged submit is in the journal, and at the end every job has ended
    I3   one place: a job holds a lease exactly while it runs
    I4   chain: ver 1, 2, 3 ..., each event begins where the last one ended, by the contract's table
    I5   an end is an end: nothing but a reopen changes a finished job
    I6   fence: +1 with every claim, unchanged by anything else
    I7   exclusion: no claim while another lease is held
    I8   no stale accept: every accepted write carries the current fence and its token
    I10  only what ran out is taken back
    I11  only the owner extends, and never to an earlier time
    I12  one end per epoch, and a resent settle gets the same answer
    I13  budget: each start counts one, none beyond the limit
    I16  an acknowledged settle is in the journal
    I17  agreement: the store holds exactly the jobs that the journal says
    I18  a job's own events: in order, one end, and it comes last
    I19  the stored state, fence and attempt are those of the last event
    I22  order: what was submitted first is first claimed first
    I24  pause: no claim between pause and resume
    I36  conservation: the counts of the store are the counts of the journal

One pass over the events, one small record per job: a hundred thousand events take about a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from leasehold.core.event import JournalEvent
from leasehold.core.job import JobEvent, JobRecord
from leasehold.core.seam import Counts
from leasehold.core.state import MACHINES, Machine

INVARIANTS = (
    *("I1", "I3", "I4", "I5", "I6", "I7", "I8", "I10", "I11", "I12", "I13"),
    *("I16", "I17", "I18", "I19", "I22", "I24", "I36"),
)
VIOLATIONS_SHOWN_MAX = 20

# Written by the holder of a lease; `bury` and `cancel` are too when they end a running job.
BY_HOLDER = frozenset({"extend", "report", "complete", "retry", "snooze", "release"})
ENDS = frozenset({"complete", "retry", "bury", "snooze", "release", "cancel"})
# What an outcome that was asked for may have become in the journal.
BECOMES = {
    "complete": {"complete"},
    "fail": {"retry", "bury", "cancel"},
    "retry": {"retry", "bury", "cancel"},
    "bury": {"bury"},
    "snooze": {"snooze", "cancel"},
    "release": {"release", "cancel"},
    "cancel": {"cancel"},
}
GONE = "(removed)"


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Log B: one call as its client saw it, or `pause` and `resume` as the operator did.

    `kind` is the outcome asked for, `answer` the class name of the verdict ("LeaseLost").
    Times are on the store's clock as well as the client knows it.
    """

    op: Literal["submit", "settle", "pause", "resume"]
    result: Literal["ok", "fail", "info"]
    begin_ms: int
    end_ms: int
    node: str = ""
    job_id: str = ""
    fence: int = 0
    kind: str = ""
    answer: str = ""
    result_h: str = ""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Log C: what was done to whom, and when."""

    kind: str
    target: str
    begin_ms: int
    end_ms: int = 0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The store itself, read when all is quiet: every job, the counts, jobs' own events."""

    records: Sequence[JobRecord]
    counts: Counts | None = None
    events: Mapping[str, Sequence[JobEvent]] = {}


class Violation(msgspec.Struct, frozen=True):
    """A broken promise, with the events that show it."""

    invariant: str
    job_id: str
    text: str
    evidence: tuple[JournalEvent | Observation | JobRecord | JobEvent, ...] = ()

    def __str__(self) -> str:
        rows = "".join(f"\n      {row}" for row in self.evidence)
        return f"{self.invariant} job {self.job_id or '-'}: {self.text}{rows}"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked, what was found. `duplicate_starts` are claims after the first of a job."""

    violations: list[Violation]
    events: int
    jobs: int
    starts: int
    duplicate_starts: int
    rejects: int
    faults: int
    by_type: dict[str, int]

    @property
    def ok(self) -> bool:
        """True when no invariant was violated."""
        return not self.violations

    @property
    def broken(self) -> set[str]:
        """The numbers of the violated invariants."""
        return {violation.invariant for violation in self.violations}

    def __str__(self) -> str:
        head = (
            f"{len(self.violations)} violations; {self.jobs} jobs, {self.events} events, "
            f"{self.starts} starts ({self.duplicate_starts} more than jobs started), "
            f"{self.rejects} stale writes refused, {self.faults} faults"
        )
        return "\n  ".join([head, *map(str, self.violations[:VIOLATIONS_SHOWN_MAX])])


class _Job:
    """What one job's events amount to so far."""

    __slots__ = (
        "attempt",
        "claimed_at",
        "claimed_ms",
        "ends",
        "epochs",
        "fence",
        "job_id",
        "last",
        "lease_ms",
        "state",
        "submitted",
        "token_h",
        "ver",
        "worker_id",
    )

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.state = ""
        self.ver = self.fence = self.attempt = self.lease_ms = 0
        self.token_h = self.worker_id = ""
        self.last: JournalEvent | None = None
        self.submitted: JournalEvent | None = None
        self.claimed_at = -1
        self.claimed_ms = 0
        self.ends: dict[int, JournalEvent] = {}
        self.epochs = 1


class _Checker:
    """Folds the journal; `violations` grows."""

    def __init__(self, machine: Machine, *, whole: bool) -> None:
        self.machine = machine
        self.whole = whole
        self.states = frozenset(machine.states)
        self.running = frozenset(machine.running)
        self.final = frozenset(machine.final)
        self.jobs: dict[str, _Job] = {}
        self.violations: list[Violation] = []
        self.paused_by: JournalEvent | None = None
        self.claims: list[JournalEvent] = []
        self.by_type: Counter[str] = Counter()

    def found(self, number: str, job_id: str, text: str, *evidence: object) -> None:
        rows = tuple(row for row in evidence if row is not None)
        self.violations.append(Violation(number, job_id, text, rows))  # type: ignore[arg-type]

    # --- one event ---------------------------------------------------------------------------

    def fold(self, index: int, event: JournalEvent) -> None:
        kind = event.type
        self.by_type[kind] += 1
        if event.ver == 0 and kind != "submit":
            self._beside(event)
            return
        job = self.jobs.get(event.job_id)
        if job is None:
            job = self.jobs[event.job_id] = self._opened(event)
        self._chain(job, event)
        self._place(job, event)
        self._numbers(job, event)
        if kind == "claim":
            self._claim(job, event, index)
        elif kind in BY_HOLDER or (kind in ENDS and job.state in self.running):
            self._write(job, event)
        elif kind == "reap":
            self._reap(job, event)
        self._after(job, event)

    def _opened(self, event: JournalEvent) -> _Job:
        """A job's record; in a trimmed history it begins with the first event that is left."""
        job = _Job(event.job_id)
        if event.type != "submit" and not self.whole:
            job.ver, job.state = event.ver - 1, event.from_state
            job.fence, job.lease_ms = event.prev_fence, event.prev_lease_until_ms
            job.attempt = event.attempt - (event.type == "claim")
            job.token_h, job.worker_id = event.token_h, event.worker_id
        return job

    def _beside(self, event: JournalEvent) -> None:
        """Events that change no job: refusals, pause and resume, a job that expired unseen."""
        if event.type == "pause":
            self.paused_by = event
        elif event.type == "resume":
            self.paused_by = None
        elif event.type == "expire" and event.job_id in self.jobs:
            job = self.jobs[event.job_id]
            job.state, job.last = GONE, event

    def _chain(self, job: _Job, event: JournalEvent) -> None:
        if event.ver != job.ver + 1:
            self.found("I4", job.job_id, f"ver {event.ver} follows {job.ver}", job.last, event)
        seen = (event.from_state, event.prev_fence, event.prev_lease_until_ms)
        left = (job.state, job.fence, job.lease_ms)
        if seen != left and event.type != "submit":
            text = f"it saw (state, fence, lease) {seen} where {left} was left"
            self.found("I4", job.job_id, text, job.last, event)
        if not self._allowed(event):
            text = f"{event.type}: no step from {event.from_state!r} to {event.to_state!r}"
            self.found("I4", job.job_id, text, job.last, event)

    def _allowed(self, event: JournalEvent) -> bool:
        here, there = event.from_state, event.to_state
        match event.type:
            case "submit":
                return not here and there in self.machine.initial
            case "extend":
                return here == there and here in self.running
            case "report":  # where stages are states, news may move the job to the next one
                return here in self.running and (
                    here == there or (there in self.running and self.machine.reaches(here, there))
                )
            case "remove":
                return here not in self.running
            case kind:
                if kind == "reopen":
                    return self.machine.allows(here, there, reopening=True)
                return self.machine.reaches(here, there)

    def _place(self, job: _Job, event: JournalEvent) -> None:
        if event.type == "remove":
            return
        leased = event.lease_until_ms > 0
        if event.to_state not in self.states or leased != (event.to_state in self.running):
            text = f"it left {event.to_state!r} with lease_until_ms {event.lease_until_ms}"
            self.found("I3", job.job_id, text, event)
        if job.state in self.final and event.type != "reopen":
            self.found("I5", job.job_id, f"{event.type} after {job.state}", job.last, event)
            if event.to_state in self.final:
                self.found("I12", job.job_id, f"it ended again by {event.type}", job.last, event)

    def _numbers(self, job: _Job, event: JournalEvent) -> None:
        claimed = event.type == "claim"
        if event.fence != job.fence + claimed:
            text = f"{event.type} left fence {event.fence} after {job.fence}"
            self.found("I6", job.job_id, text, job.last, event)
        expected = job.attempt + claimed
        if event.type in ("release", "snooze"):
            expected -= 1
        elif event.type == "reopen":
            expected = 0
        if event.attempt != expected and event.type != "remove":
            text = f"{event.type} left attempt {event.attempt}, not {expected}"
            self.found("I13", job.job_id, text, job.last, event)
        if event.max_attempts and event.attempt > event.max_attempts:
            text = f"start {event.attempt} of at most {event.max_attempts}"
            self.found("I13", job.job_id, text, event)

    def _claim(self, job: _Job, event: JournalEvent, index: int) -> None:
        if job.state in self.running:
            text = f"{event.worker_id} got it while {job.worker_id} held it"
            self.found("I7", job.job_id, text, job.last, event)
        if self.paused_by is not None:
            self.found("I24", job.job_id, "claimed while paused", self.paused_by, event)
        if job.claimed_at < 0:
            job.claimed_at, job.claimed_ms = index, event.ts_ms
        self.claims.append(event)

    def _write(self, job: _Job, event: JournalEvent) -> None:
        other_token = event.token_h != job.token_h and bool(event.token_h and job.token_h)
        other_worker = bool(event.worker_id and job.worker_id) and event.worker_id != job.worker_id
        if other_token or other_worker or job.state not in self.running:
            text = f"{event.type} accepted from another than the holder {job.worker_id or '-'}"
            self.found("I8", job.job_id, text, job.last, event)
            if event.type == "extend":
                self.found("I11", job.job_id, "extended by another", job.last, event)
        if event.type == "extend" and event.lease_until_ms < job.lease_ms:
            text = f"the lease went back from {job.lease_ms} to {event.lease_until_ms}"
            self.found("I11", job.job_id, text, job.last, event)
        if event.type in ENDS:
            job.ends[event.fence] = event

    def _reap(self, job: _Job, event: JournalEvent) -> None:
        if event.ts_ms < job.lease_ms:
            text = f"reaped {job.lease_ms - event.ts_ms} ms before its lease ran out"
            self.found("I10", job.job_id, text, job.last, event)

    def _after(self, job: _Job, event: JournalEvent) -> None:
        job.ver, job.fence, job.attempt = event.ver, event.fence, event.attempt
        job.state = GONE if event.type == "remove" else event.to_state
        job.lease_ms = event.lease_until_ms
        job.last = event
        if event.type == "submit":
            job.submitted = event
        elif event.type == "claim":
            job.token_h, job.worker_id = event.token_h, event.worker_id
        elif event.type == "reopen":
            job.epochs += 1

    # --- the whole ---------------------------------------------------------------------------

    def finish(self, *, quiesced: bool) -> None:
        for job in self.jobs.values():
            if quiesced and job.state not in self.final and job.state != GONE:
                self.found("I1", job.job_id, f"at the end it is still {job.state!r}", job.last)
            if self.whole and job.submitted is None:
                self.found("I4", job.job_id, "no submit event", job.last)
        self._order()

    def _order(self) -> None:
        """First claims of undelayed jobs, by submit order within queue and priority."""
        latest: dict[tuple[str, int], _Job] = {}
        for job in self.jobs.values():
            if job.submitted is None or job.submitted.due_ms or job.claimed_at < 0:
                continue
            line = (job.submitted.queue, job.submitted.priority)
            before = latest.get(line)
            slack_ms = self.machine.overtake_ms
            if before is not None and before.claimed_at > job.claimed_at:
                if slack_ms and before.claimed_ms - job.claimed_ms <= slack_ms:
                    continue
                text = f"claimed before {before.job_id}, which was submitted earlier"
                self.found("I22", job.job_id, text, before.submitted, job.submitted)
            else:
                latest[line] = job

    def observed(self, observations: Iterable[Observation]) -> None:
        paused_ms = 0
        for seen in observations:
            if seen.op == "submit" and seen.result == "ok" and seen.job_id not in self.jobs:
                self.found("I1", seen.job_id, "acknowledged, but not in the journal", seen)
            elif seen.op == "settle" and seen.result == "ok":
                self._settled(seen)
            elif seen.op == "pause" and seen.result == "ok":
                paused_ms = seen.end_ms
            elif seen.op == "resume" and paused_ms:
                self._paused(paused_ms, seen)
                paused_ms = 0

    def _settled(self, seen: Observation) -> None:
        job = self.jobs.get(seen.job_id)
        end = job.ends.get(seen.fence) if job else None
        mine = end is not None and end.type in BECOMES.get(seen.kind, ())
        same = mine and end is not None and end.result_h == (seen.result_h or end.result_h)
        if seen.answer == "LeaseLost":
            if same and end is not None and end.worker_id == (seen.node or end.worker_id):
                text = "its settle was accepted, and sent again it was refused"
                self.found("I12", seen.job_id, text, end, seen)
        elif end is None and job is not None and job.fence > seen.fence:
            text = f"a settle with fence {seen.fence} was acknowledged at fence {job.fence}"
            self.found("I8", seen.job_id, text, job.last, seen)
        elif not same:
            text = f"{seen.kind} was acknowledged, but the journal has no such end"
            self.found("I16", seen.job_id, text, end, seen)

    def _paused(self, paused_ms: int, resume: Observation) -> None:
        for claim in self.claims:
            if paused_ms < claim.ts_ms < resume.begin_ms:
                self.found("I24", claim.job_id, "claimed while paused", claim, resume)

    def scanned(self, snapshot: Snapshot) -> None:
        stored = {record.job_id: record for record in snapshot.records}
        for job in self.jobs.values():
            record = stored.get(job.job_id)
            if (record is None) != (job.state == GONE):
                text = (
                    f"the journal left it {job.state!r}, the store has {record and record.state!r}"
                )
                self.found("I17", job.job_id, text, job.last, record)
            elif record is not None:
                self._agrees(job, record)
        for job_id in stored.keys() - self.jobs.keys():
            self.found("I17", job_id, "in the store, but not in the journal", stored[job_id])
        for job_id, events in snapshot.events.items():
            self._told(self.jobs.get(job_id), events)
        if snapshot.counts is not None:
            self._conserved(snapshot.counts)

    def _agrees(self, job: _Job, record: JobRecord) -> None:
        stored = (record.state, record.fence, record.attempt)
        if stored != (job.state, job.fence, job.attempt):
            text = f"stored {stored}, last event {(job.state, job.fence, job.attempt)}"
            self.found("I19", job.job_id, text, job.last, record)

    def _told(self, job: _Job | None, events: Sequence[JobEvent]) -> None:
        if job is None or not events:
            return
        ids = [_position(event.event_id) for event in events]
        if any(later <= earlier for earlier, later in pairwise(ids)):
            self.found("I18", job.job_id, "its own events are out of order", *events)
        ends = [event for event in events if event.type in self.final]
        if job.state in self.final and (not ends or events[-1].type != job.state):
            self.found(
                "I18", job.job_id, f"its own events do not end with {job.state!r}", events[-1]
            )
        if len(ends) > job.epochs:
            self.found("I18", job.job_id, "its own events end more than once", *ends)

    def _conserved(self, counts: Counts) -> None:
        states = Counter(job.state for job in self.jobs.values() if job.state != GONE)
        for state in {*states, *counts.states}:
            if states[state] != counts.states.get(state, 0):
                text = (
                    f"{counts.states.get(state, 0)} {state!r} counted, {states[state]} in history"
                )
                self.found("I36", "", text)


def _position(event_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in event_id.split("-"))


def check(
    events: Sequence[JournalEvent],
    *,
    observations: Iterable[Observation] = (),
    faults: Iterable[Fault] = (),
    snapshot: Snapshot | None = None,
    machine: Machine | None = None,
    quiesced: bool = True,
    whole: bool = True,
) -> Verdict:
    """Check one queue's history. `events` come in store order.

    `quiesced` says that everything had time to end. `whole` off allows a journal whose oldest
    events were trimmed away.
    """
    contract = events[0].contract if events else "memory"
    checker = _Checker(machine or MACHINES[contract], whole=whole)
    for index, event in enumerate(events):
        checker.fold(index, event)
    checker.finish(quiesced=quiesced)
    checker.observed(observations)
    if snapshot is not None:
        checker.scanned(snapshot)
    starts = checker.by_type["claim"]
    started = sum(job.claimed_at >= 0 for job in checker.jobs.values())
    return Verdict(
        violations=checker.violations,
        events=len(events),
        jobs=len(checker.jobs),
        starts=starts,
        duplicate_starts=starts - started,
        rejects=checker.by_type["reject"],
        faults=sum(1 for _ in faults),
        by_type=dict(checker.by_type),
    )
