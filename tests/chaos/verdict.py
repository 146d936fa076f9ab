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
    I14  duplicates: a job starts again only after a lost lease, a failure, a return or a reopen
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

from collections.abc import Iterable, Sequence

import msgspec

from tenure.core.journal import BY_HOLDER, HistoryChecker, JournalEvent, Violation
from tenure.core.registry import machines
from tenure.core.state import Machine
from tests.chaos.witness import Fault, Observation, Snapshot, observed, scanned

INVARIANTS = (
    *("I1", "I3", "I4", "I5", "I6", "I7", "I8", "I10", "I11", "I12", "I13", "I14"),
    *("I16", "I17", "I18", "I19", "I22", "I24", "I36"),
)
VIOLATIONS_SHOWN_MAX = 20


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


def machine_of(subject: str) -> Machine:
    """The machine of a contract; one that is tried on several stores is `contract_store`."""
    return machines()[subject.partition("_")[0]]


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
    checker = HistoryChecker(machine or machines()[contract], whole=whole)
    for index, event in enumerate(events):
        checker.add(index, event)
    checker.finish(quiesced=quiesced)
    observed(checker, observations)
    if snapshot is not None:
        scanned(checker, snapshot)
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


__all__ = [
    "BY_HOLDER",
    "INVARIANTS",
    "Fault",
    "Observation",
    "Snapshot",
    "Verdict",
    "Violation",
    "check",
    "machine_of",
]
