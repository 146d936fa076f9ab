"""Claims whose answer may have been lost (M-9).

A claim changes the store, so a claimer that lost the answer must get the same leases again, and a
claim that the network kept back must not take leases for a caller that no longer listens. Each
queue instance numbers its calls and says with each call which answer it saw last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tenure.contracts.memory.stored import StoredJob


class ClaimId(msgspec.Struct, frozen=True):
    """One claim call: who calls, which call of theirs it is, the last call they got an answer to.

    An instance has one claim in flight at a time; its numbers rise.
    """

    instance: str
    number: int
    received: int


class Unanswered:
    """The leases of each instance that it has not yet confirmed to have received."""

    def __init__(self, jobs: Mapping[str, StoredJob]) -> None:
        self._jobs = jobs
        self._number: dict[str, int] = {}
        self._sent: dict[str, dict[tuple[str, int], int]] = {}

    def begin(self, claim: ClaimId) -> bool:
        """False for a call older than one already served: its caller gave up long ago."""
        if claim.number <= self._number.get(claim.instance, 0):
            return False
        self._number[claim.instance] = claim.number
        return True

    def again(self, claim: ClaimId, limit: int) -> list[StoredJob]:
        """Leases of earlier calls that never arrived and are still held, up to `limit`."""
        sent = self._sent.setdefault(claim.instance, {})
        found: list[StoredJob] = []
        for (job_id, fence), number in list(sent.items()):
            job = self._jobs.get(job_id)
            held = job is not None and job.state == "running" and job.fence == fence
            if number == claim.received or job is None or not held:
                del sent[job_id, fence]
            elif len(found) < limit:
                found.append(job)
        return found

    def sent(self, claim: ClaimId, jobs: Sequence[StoredJob]) -> None:
        """These leases leave with the answer to this call."""
        sent = self._sent[claim.instance]
        sent.update({(job.job_id, job.fence): claim.number for job in jobs})

    def forget(self, instance: str) -> None:
        """Nobody will ask in this name again."""
        self._number.pop(instance, None)
        self._sent.pop(instance, None)
