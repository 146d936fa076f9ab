"""The last step of an attempt: the store's verdict, or the loss of the lease, is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from tenure.core.errors import LeaseLost
from tenure.core.lease import Lease
from tenure.core.outcome import Buried, Cancelled, Completed, Released, Retried, Verdict
from tenure.worker.holding import Attempt
from tenure.worker.listening import Listeners
from tenure.worker.settling import Entry
from tenure.worker.source import Source
from tenure.worker.watching import Watch

log = structlog.get_logger("tenure.worker")

VERDICT_NAMES: dict[type, str] = {
    Completed: "completed",
    Retried: "retried",
    Buried: "buried",
    Released: "released",
    Cancelled: "cancelled",
    LeaseLost: "lost",
}


class Announcer:
    """Takes attempts off the books and counts how they ended."""

    def __init__(self, watch: Watch, listeners: Listeners, *, debug: bool) -> None:
        self._watch = watch
        self._listeners = listeners
        self._debug = debug

    def verdicts(self, entries: Sequence[Entry], verdicts: Sequence[Verdict]) -> None:
        """The store answered a batch of outcomes."""
        source: Source = entries[0].owner.source
        for entry, verdict in zip(entries, verdicts, strict=True):
            source.held.pop(entry.held, None)
            self._count(entry.owner, VERDICT_NAMES[type(verdict)])
            if self._listeners:
                self._listeners.ended(entry.owner, verdict)
            if isinstance(verdict, LeaseLost):
                log.warning("lease lost", **lease_facts(entry.held.lease), reason=verdict.reason)
        if source.contact.made("settle"):
            self._watch.tell("contact")
        self._watch.tell("settled", len(entries))

    def dropped(self, entry: Entry, error: Exception) -> None:
        """An outcome that the store will never take is worth nothing: the lease is lost."""
        reason = error.reason if isinstance(error, LeaseLost) else f"its outcome failed: {error}"
        self.lost(entry.owner, reason)

    def lost(self, attempt: Attempt, reason: str) -> None:
        """Nothing is written for this attempt any more, and its lease runs out."""
        held = attempt.held
        held.lost = True
        held.kept = False
        attempt.source.held.pop(held, None)
        log.warning("lease lost", **lease_facts(held.lease), reason=reason)
        self._count(attempt, "lost")

    def _count(self, attempt: Attempt, outcome: str) -> None:
        held, tally = attempt.held, attempt.tally
        lease = held.lease
        tally.finished[outcome] = tally.finished.get(outcome, 0) + 1
        tally.run.observe(held.ran_s)
        if outcome == "retried":
            tally.retried += 1
        elif outcome == "lost":
            tally.lost += 1
            self._watch.tell("lost")
        if self._debug:
            log.debug("attempt ended", **lease_facts(lease), outcome=outcome, run_s=held.ran_s)


def lease_facts(lease: Lease) -> dict[str, Any]:
    """What a log line about an attempt should carry."""
    return {
        "job_id": lease.job_id,
        "task": lease.task,
        "queue": lease.queue,
        "attempt": lease.attempt,
    }
