"""What others saw of a history: clients their answers, a scan the store. See `verdict`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from tenure.core.job import JobEvent, JobRecord
from tenure.core.journal import BECOMES, GONE, HistoryChecker, JobHistory
from tenure.core.seam import Counts


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


def observed(checker: HistoryChecker, observations: Iterable[Observation]) -> None:
    paused_ms = 0
    for seen in observations:
        if seen.op == "submit" and seen.result == "ok" and seen.job_id not in checker.jobs:
            checker.found("I1", seen.job_id, "acknowledged, but not in the journal", seen)
        elif seen.op == "settle" and seen.result == "ok":
            _settled(checker, seen)
        elif seen.op == "pause" and seen.result == "ok":
            paused_ms = seen.end_ms
        elif seen.op == "resume" and paused_ms:
            _paused(checker, paused_ms, seen)
            paused_ms = 0


def _settled(checker: HistoryChecker, seen: Observation) -> None:
    job = checker.jobs.get(seen.job_id)
    end = job.ends.get(seen.fence) if job else None
    mine = end is not None and end.type in BECOMES.get(seen.kind, ())
    same = mine and end is not None and end.result_h == (seen.result_h or end.result_h)
    if seen.answer == "LeaseLost":
        if same and end is not None and end.worker_id == (seen.node or end.worker_id):
            text = "its settle was accepted, and sent again it was refused"
            checker.found("I12", seen.job_id, text, end, seen)
    elif end is None and job is not None and job.fence > seen.fence:
        text = f"a settle with fence {seen.fence} was acknowledged at fence {job.fence}"
        checker.found("I8", seen.job_id, text, job.last, seen)
    elif not same:
        text = f"{seen.kind} was acknowledged, but the journal has no such end"
        checker.found("I16", seen.job_id, text, end, seen)


def _paused(checker: HistoryChecker, paused_ms: int, resume: Observation) -> None:
    for claim in checker.claims:
        if paused_ms < claim.ts_ms < resume.begin_ms:
            checker.found("I24", claim.job_id, "claimed while paused", claim, resume)


def scanned(checker: HistoryChecker, snapshot: Snapshot) -> None:
    stored = {record.job_id: record for record in snapshot.records}
    for job in checker.jobs.values():
        record = stored.get(job.job_id)
        if (record is None) != (job.state == GONE):
            text = f"the journal left it {job.state!r}, the store has {record and record.state!r}"
            checker.found("I17", job.job_id, text, job.last, record)
        elif record is not None:
            _agrees(checker, job, record)
    for job_id in stored.keys() - checker.jobs.keys():
        checker.found("I17", job_id, "in the store, but not in the journal", stored[job_id])
    for job_id, events in snapshot.events.items():
        _told(checker, checker.jobs.get(job_id), events)
    if snapshot.counts is not None:
        _conserved(checker, snapshot.counts)


def _agrees(checker: HistoryChecker, job: JobHistory, record: JobRecord) -> None:
    stored = (record.state, record.fence, record.attempt)
    if stored != (job.state, job.fence, job.attempt):
        text = f"stored {stored}, last event {(job.state, job.fence, job.attempt)}"
        checker.found("I19", job.job_id, text, job.last, record)


def _told(checker: HistoryChecker, job: JobHistory | None, events: Sequence[JobEvent]) -> None:
    if job is None or not events:
        return
    ids = [_position(event.event_id) for event in events]
    if any(later <= earlier for earlier, later in pairwise(ids)):
        checker.found("I18", job.job_id, "its own events are out of order", *events)
    ends = [event for event in events if event.type in checker.final]
    if job.state in checker.final and (not ends or events[-1].type != job.state):
        checker.found(
            "I18", job.job_id, f"its own events do not end with {job.state!r}", events[-1]
        )
    if len(ends) > job.epochs:
        checker.found("I18", job.job_id, "its own events end more than once", *ends)


def _conserved(checker: HistoryChecker, counts: Counts) -> None:
    states = Counter(job.state for job in checker.jobs.values() if job.state != GONE)
    for state in {*states, *counts.states}:
        if states[state] != counts.states.get(state, 0):
            text = f"{counts.states.get(state, 0)} {state!r} counted, {states[state]} in history"
            checker.found("I36", "", text)


def _position(event_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in event_id.split("-"))
