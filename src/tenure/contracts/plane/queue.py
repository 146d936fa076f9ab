"""The queue of the `plane` contract, over a plane of this process or over HTTP.

Every claim has an id. If an answer is lost, the next claim names the id of the lost one and gets
the leases that it took.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from tenure.contracts.plane.model import CONTRACT, Claim, PlaneApi
from tenure.core.errors import LeaseLost, UsageError
from tenure.core.job import Children, NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Verdict
from tenure.core.seam import QueueFeatures, Upkeep

_LIMIT_MAX = 500
_LOST_MAX = 20


class WorkerFlows:
    """The flows of a plane as its workers see them. The plane itself submits the next jobs."""

    def __init__(self, api: PlaneApi) -> None:
        self._api = api

    async def start(self, flow_id: str, stages: Sequence[Sequence[NewJob]]) -> Sequence[Submitted]:
        """Refuse: the later jobs are kept at the plane's database."""
        raise UsageError(
            "a plane over HTTP is a worker's side; chain and gather jobs at its database, "
            "plane+sqlite:// or plane+postgresql://",
            contract=CONTRACT,
        )

    async def finished(self, job_id: str, result: bytes) -> Sequence[Submitted]:
        """Nothing to do: the plane submits the next jobs when it settles this one."""
        return ()

    async def before(self, job_id: str) -> Sequence[str]:
        """Unknown to a worker."""
        return ()

    async def children(self, lease: Lease) -> Children:
        """The results of the jobs that a running job waited for."""
        return await self._api.children(lease)


class PlaneQueue:
    """A queue of some streams for one worker and one event loop."""

    def __init__(self, api: PlaneApi, *, streams: tuple[str, ...], worker_id: str = "") -> None:
        self._api = api
        self.worker_id = worker_id or anonymous()
        self.slots = 0
        self._streams = streams
        self._unanswered: list[str] = []

    @property
    def features(self) -> QueueFeatures:
        """What it has beyond the seam."""
        return QueueFeatures(
            claim_max=_LIMIT_MAX,
            holds_nul=False,
            contract=CONTRACT,
            schedules=self._api.schedules,
            flows=WorkerFlows(self._api),
        )

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; a known id or idempotency key answers with its job."""
        return await self._api.submit(jobs) if jobs else []

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases; those of a lost answer come first."""
        if limit < 1:
            return []
        claim_id, lost = secrets.token_hex(12), tuple(self._unanswered)
        claim = Claim(
            worker_id=self.worker_id,
            streams=self._streams,
            limit=min(limit, _LIMIT_MAX),
            wait_ms=wait_ms,
            claim_id=claim_id,
            lost=lost,
            fresh=True,
        )
        try:
            leases = await self._api.claim(claim)
        except BaseException:  # a cancelled call may have taken leases too
            self._unanswered = [*self._unanswered, claim_id][-_LOST_MAX:]
            raise
        self._unanswered = [each for each in self._unanswered if each not in lost]
        return leases

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Keep leases alive."""
        return await self._api.extend(leases) if leases else []

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Store reports of running attempts."""
        return await self._api.report(reports) if reports else []

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases; the plane decides whether a failed job runs again."""
        return await self._api.settle(outcomes) if outcomes else []

    async def upkeep(self) -> Upkeep:
        """Ask for a round of upkeep, which a plane also runs by itself."""
        return await self._api.upkeep(self.worker_id, slots=self.slots)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()


def anonymous() -> str:
    """An id for a worker that has none."""
    return f"anon-{secrets.token_hex(6)}"
