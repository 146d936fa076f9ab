"""The journal: its events, how its lines are written, and the rules that a history must keep."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeAlias

import msgspec

from tenure.core.state import Machine

EVENT_TYPES = (
    "submit",  # the job is stored and waits
    "promote",  # it became due, or an operator brought it forward: it waits for a worker now
    "claim",  # a lease was taken; attempt and fence rose
    "extend",  # the holder kept its lease
    "report",  # the holder reported progress
    "complete",  # accepted results
    "fail",  # failed, and what becomes of it is decided next
    "retry",  # failed, waits again
    "bury",  # failed for good
    "snooze",  # put back by its handler, attempt not counted
    "release",  # put back by its worker, attempt not counted
    "reap",  # the lease ran out and was taken away
    "cancel",  # ended on request
    "expire",  # it outlived its time to live before it ran
    "reopen",  # an operator sent a finished job back: a new epoch
    "remove",  # an operator deleted it
    "reject",  # the write of a stale holder was refused; nothing changed
    "pause",  # of the queue, not of a job: no more claims
    "resume",  # of the queue: claims again
)


class JournalEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One transition, in store order by `seq`; `ver` counts 1, 2, 3 ... within the job.

    `ver` 0 marks an event that changed no job (`reject`, `pause`, `resume`). Zero and "" mean
    "not applicable".
    """

    seq: str
    contract: str
    queue: str
    job_id: str
    type: str
    ts_ms: int
    ver: int = 0
    task: str = ""
    from_state: str = ""
    to_state: str = ""
    attempt: int = 0
    fence: int = 0
    prev_fence: int = 0
    token_h: str = ""
    worker_id: str = ""
    lease_until_ms: int = 0
    prev_lease_until_ms: int = 0
    event_id: str = ""
    gid: str = ""
    priority: int = 0
    due_ms: int = 0
    max_attempts: int = 0
    error_code: str = ""
    payload_h: str = ""
    result_h: str = ""
    data: str = ""


class StreamFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A Redis stream of packed lines.

    Its entries hold lines (see `store.journal`): values in the order of `fields`, joined by tabs,
    without the empty ones at the end. The last field may contain tabs. `task` is the task of jobs
    whose lines name none. `captured` is a hash and a field in which capture stores its position;
    the contract trims only what was captured.
    """

    store: str
    key: str
    contract: str
    queue: str
    fields: tuple[str, ...]
    task: str = ""
    captured: tuple[str, str] = ("", "")


class SqlFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A table of PostgreSQL or SQLite, one event a row, its columns named as the journal's fields.

    store         the URL of the database
    seq           the column that rises with every row
    where         an SQL condition that selects the rows of one queue
    sequence      what numbers the rows, on SQLite the table if `table` is a view of it. PostgreSQL
                  assigns numbers before their transactions commit, so rows are read only up to a
                  number that no open transaction can still use
    states        pairs: a state of the table, and the contract's word for it
    queue_prefix  the prefix of the queues' names in the table
    jobs          the table of the jobs, with `job_id` and `ver`, the number of their last event
    kept          an SQL condition for rows that are trimmed only with their job
    queues        the queues by their names in the database, where capture stores its position; the
                  contract trims only what was captured
    schema        the schema of the database, if there may be several
    narrow        what to read instead of `table`, if something faster holds the rows of `where`
    by_job        an SQL condition for rows that can be found by their job
    """

    store: str
    table: str
    contract: str
    queue: str
    fields: tuple[str, ...]
    seq: str = "seq"
    where: str = "true"
    sequence: str = ""
    states: tuple[tuple[str, str], ...] = ()
    queue_prefix: str = ""
    jobs: str = ""
    kept: str = "type = 'submit'"
    queues: tuple[str, ...] = ()
    schema: str = ""
    narrow: str = ""
    by_job: str = "true"


JournalFormat: TypeAlias = StreamFormat | SqlFormat
"""Where a journal is and how it is written, for readers in bulk.

`Journal` of the seam reads any history, one event object at a time. If the descriptor of a contract
has a `journal_format`, the pipeline reads ranges of the journal in parallel, straight into columns.
"""


# Written by the holder of a lease; `bury` and `cancel` are too when they end a running job.
BY_HOLDER = frozenset({"extend", "report", "complete", "retry", "snooze", "release"})
ENDS = frozenset({"complete", "fail", "retry", "bury", "snooze", "release", "cancel"})
# After these a job may start again: its lease was lost, it failed, was put back or sent back.
AGAIN = frozenset({"submit", "fail", "retry", "snooze", "release", "reap", "reopen"})
# The event types that the outcome of a worker may have become in the journal.
BECOMES = {
    "complete": {"complete"},
    "fail": {"fail", "retry", "bury", "cancel"},
    "retry": {"fail", "retry", "bury", "cancel"},
    "bury": {"fail", "bury"},
    "snooze": {"fail", "snooze", "cancel"},
    "release": {"fail", "release", "cancel"},
    "cancel": {"fail", "cancel"},
}
GONE = "(removed)"


class Violation(msgspec.Struct, frozen=True):
    """A broken invariant, with the events that show it."""

    invariant: str
    job_id: str
    text: str
    evidence: tuple[Any, ...] = ()

    def __str__(self) -> str:
        rows = "".join(f"\n      {row}" for row in self.evidence)
        return f"{self.invariant} job {self.job_id or '-'}: {self.text}{rows}"


def is_allowed(machine: Machine, kind: str, here: str, there: str) -> bool:
    """Whether an event of this kind may lead from here to there, by the contract's table."""
    match kind:
        case "submit":
            return not here and there in machine.initial
        case "extend":
            return here == there and here in machine.running
        case "report":  # where stages are states, a report may move the job to the next one
            return here in machine.running and (
                here == there or (there in machine.running and machine.reaches(here, there))
            )
        case "promote":  # also to the same state, with another due time or priority
            stays = _waits(machine, here) and _waits(machine, there)
            return stays and (here == there or machine.reaches(here, there))
        case "remove":
            return here not in machine.running and there not in machine.states
        case "reopen":
            return machine.allows(here, there, reopening=True)
        case _:
            return machine.reaches(here, there) and _fits(machine, kind, here, there)


def _fits(machine: Machine, kind: str, here: str, there: str) -> bool:
    """Whether a step of the table is one of this kind."""
    waits = _waits(machine, there)
    match kind:
        case "claim":
            return there in machine.running
        case "complete":
            return there == machine.final[0]
        case "fail":  # to where a failed job rests
            return waits and there not in machine.initial
        case "retry":
            return waits
        case "snooze" | "release":
            return waits and here in machine.running
        case "reap":
            return (waits or there in machine.final[1:]) and here in machine.running
        case "bury" | "cancel" | "expire":
            return there in machine.final[1:]
    return False


def _waits(machine: Machine, state: str) -> bool:
    return state in machine.states and state not in (*machine.running, *machine.final)


class JobHistory:
    """The state of one job after the events so far."""

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
        "may_start",
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
        self.may_start = True


class HistoryChecker:
    """Replays the journal and collects `violations`.

    With `foreign`, programs that write no journal may take part: a step of theirs shows only in
    what the next event saw. Such steps are counted in `unobserved`, by job.
    """

    def __init__(self, machine: Machine, *, whole: bool, foreign: bool = False) -> None:
        self.machine = machine
        self.whole = whole
        self.foreign = foreign
        self.unobserved: Counter[str] = Counter()
        self.states = frozenset(machine.states)
        self.running = frozenset(machine.running)
        self.final = frozenset(machine.final)
        self.jobs: dict[str, JobHistory] = {}
        self.violations: list[Violation] = []
        self.paused_by: JournalEvent | None = None
        self.claims: list[JournalEvent] = []
        self.by_type: Counter[str] = Counter()

    def found(self, number: str, job_id: str, text: str, *evidence: object) -> None:
        rows = tuple(row for row in evidence if row is not None)
        self.violations.append(Violation(number, job_id, text, rows))

    # --- one event ---------------------------------------------------------------------------

    def add(self, index: int, event: JournalEvent) -> None:
        kind = event.type
        self.by_type[kind] += 1
        if event.ver == 0 and kind != "submit":
            self._add_other(event)
            return
        job = self.jobs.get(event.job_id)
        if job is None:
            job = self.jobs[event.job_id] = self._opened(event)
        if self.foreign:
            self._accept_foreign(job, event)
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

    def _opened(self, event: JournalEvent) -> JobHistory:
        """A new history; in a trimmed journal it begins with the first event that is left."""
        job = JobHistory(event.job_id)
        by_foreign = event.type == "claim" and event.ver == 1
        self.unobserved[event.job_id] += by_foreign
        if event.type != "submit" and (not self.whole or by_foreign):
            job.ver, job.state = event.ver - 1, event.from_state
            job.fence, job.lease_ms = event.prev_fence, event.prev_lease_until_ms
            job.attempt = event.attempt - (event.type == "claim")
            job.token_h, job.worker_id = event.token_h, event.worker_id
        return job

    def _accept_foreign(self, job: JobHistory, event: JournalEvent) -> None:
        """Accept the steps that foreign programs made since the last event, if no fence fell."""
        seen = (event.from_state, event.prev_fence, event.prev_lease_until_ms)
        left = (job.state, job.fence, job.lease_ms)
        if event.ver != job.ver + 1 or event.prev_fence < job.fence:
            return
        if event.type == "submit":
            job.fence = event.fence
            self.unobserved[job.job_id] += event.fence > 0
        elif seen != left:
            self.unobserved[job.job_id] += 1
            job.state, job.fence, job.lease_ms = seen
            job.may_start = True
            job.attempt = event.attempt - (event.type == "claim")
            job.token_h, job.worker_id = event.token_h, event.worker_id

    def _add_other(self, event: JournalEvent) -> None:
        """Events without a version: refusals, pause and resume, a job that expired unobserved."""
        if event.type == "pause":
            self.paused_by = event
        elif event.type == "resume":
            self.paused_by = None
        elif event.type == "expire" and event.job_id in self.jobs:
            job = self.jobs[event.job_id]
            job.state, job.last = GONE, event

    def _chain(self, job: JobHistory, event: JournalEvent) -> None:
        if event.ver != job.ver + 1:
            self.found("I4", job.job_id, f"ver {event.ver} follows {job.ver}", job.last, event)
        seen = (event.from_state, event.prev_fence, event.prev_lease_until_ms)
        left = (job.state, job.fence, job.lease_ms)
        if seen != left and event.type != "submit":
            text = f"it saw (state, fence, lease) {seen} where {left} was left"
            self.found("I4", job.job_id, text, job.last, event)
        if not is_allowed(self.machine, event.type, event.from_state, event.to_state):
            text = f"{event.type}: no step from {event.from_state!r} to {event.to_state!r}"
            self.found("I4", job.job_id, text, job.last, event)

    def _place(self, job: JobHistory, event: JournalEvent) -> None:
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

    def _numbers(self, job: JobHistory, event: JournalEvent) -> None:
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

    def _claim(self, job: JobHistory, event: JournalEvent, index: int) -> None:
        if job.state in self.running:
            text = f"{event.worker_id} got it while {job.worker_id} held it"
            self.found("I7", job.job_id, text, job.last, event)
        if 0 < event.lease_until_ms <= event.ts_ms:
            text = f"the lease was over {event.ts_ms - event.lease_until_ms} ms before the claim"
            self.found("I3", job.job_id, text, event)
        if not job.may_start:
            text = f"start {event.fence} follows no failure, lost lease or return"
            self.found("I14", job.job_id, text, job.last, event)
        if self.paused_by is not None:
            self.found("I24", job.job_id, "claimed while paused", self.paused_by, event)
        if job.claimed_at < 0:
            job.claimed_at, job.claimed_ms = index, event.ts_ms
        self.claims.append(event)

    def _write(self, job: JobHistory, event: JournalEvent) -> None:
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

    def _reap(self, job: JobHistory, event: JournalEvent) -> None:
        if event.ts_ms < job.lease_ms:
            text = f"reaped {job.lease_ms - event.ts_ms} ms before its lease ran out"
            self.found("I10", job.job_id, text, job.last, event)

    def _after(self, job: JobHistory, event: JournalEvent) -> None:
        job.ver, job.fence, job.attempt = event.ver, event.fence, event.attempt
        job.state = GONE if event.type == "remove" else event.to_state
        job.lease_ms = event.lease_until_ms
        job.last = event
        job.may_start = event.type in AGAIN or (job.may_start and event.type != "claim")
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
            if self.whole and job.submitted is None and not self.unobserved[job.job_id]:
                self.found("I4", job.job_id, "no submit event", job.last)
        self._order()

    def _order(self) -> None:
        """First claims of undelayed jobs, by submit order within queue and priority."""
        latest: dict[tuple[str, int], JobHistory] = {}
        for job in self.jobs.values():
            if job.submitted is None or job.submitted.due_ms or job.claimed_at < 0:
                continue
            following = self.machine.steps.get(job.submitted.to_state, ())
            if self.running.isdisjoint(following):  # it waits for its children first
                continue
            order = (job.submitted.queue, job.submitted.priority)
            before = latest.get(order)
            slack_ms = self.machine.order_slack_ms
            if before is not None and before.claimed_at > job.claimed_at:
                if slack_ms and before.claimed_ms - job.claimed_ms <= slack_ms:
                    continue
                text = f"claimed before {before.job_id}, which was submitted earlier"
                self.found("I22", job.job_id, text, before.submitted, job.submitted)
            else:
                latest[order] = job
