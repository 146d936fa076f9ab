"""The `plane` contract on the seam: one queue over the plane's verbs, near or far.

`plane+sqlite://` and `plane+postgresql://` speak to the database and are a plane themselves;
`plane+http://` speaks to a plane and needs nothing but a way out. Which it is, the queue cannot
tell: its claims have ids, and when an answer does not come, the next claim names the one that was
lost and gets what it took.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from tenure.contracts.plane.model import Ask, Verbs
from tenure.core.errors import LeaseLost
from tenure.core.job import NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Verdict
from tenure.core.seam import QueueFeatures, Upkeep

_LIMIT_MAX = 500
_LOST_MAX = 20


class PlaneQueue:
    """A queue of some streams for one worker and one event loop."""

    def __init__(self, verbs: Verbs, *, streams: tuple[str, ...], worker_id: str = "") -> None:
        self.verbs = verbs
        self.worker_id = worker_id or anonymous()
        self.slots = 0
        self._streams = streams
        self._unanswered: list[str] = []

    @property
    def features(self) -> QueueFeatures:
        """What it has beyond the seam."""
        return QueueFeatures(claim_max=_LIMIT_MAX, holds_nul=False)

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; an id or idempotency key seen before answers with the job it stands for."""
        return await self.verbs.submit(jobs) if jobs else []

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases, what a lost answer held before anything else."""
        if limit < 1:
            return []
        claim_id, lost = secrets.token_hex(12), tuple(self._unanswered)
        ask = Ask(
            worker_id=self.worker_id,
            streams=self._streams,
            limit=min(limit, _LIMIT_MAX),
            wait_ms=wait_ms,
            claim_id=claim_id,
            lost=lost,
            fresh=True,
        )
        try:
            leases = await self.verbs.claim(ask)
        except (
            BaseException
        ):  # cancelled too: whatever ended this call, it may have taken something
            self._unanswered = [*self._unanswered, claim_id][-_LOST_MAX:]
            raise
        self._unanswered = [each for each in self._unanswered if each not in lost]
        return leases

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Keep leases alive."""
        return await self.verbs.extend(leases) if leases else []

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Publish news of running attempts."""
        return await self.verbs.report(reports) if reports else []

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases; the plane decides whether a failed job runs again."""
        return await self.verbs.settle(outcomes) if outcomes else []

    async def upkeep(self) -> Upkeep:
        """Ask for what time made due. A plane does it by itself as well."""
        return await self.verbs.upkeep(self.worker_id, slots=self.slots)

    async def close(self) -> None:
        """Let go of connections."""
        await self.verbs.close()


def anonymous() -> str:
    """A name for somebody who has none."""
    return f"anon-{secrets.token_hex(6)}"
