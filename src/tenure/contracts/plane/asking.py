"""What is asked of a plane, in process or over HTTP: the same verbs, so one queue serves both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from tenure.core.errors import LeaseLost
from tenure.core.job import NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Verdict
from tenure.core.seam import Upkeep


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A claim. `streams` () means all, in the plane's own order.

    `claim_id` names the claim, so that it can be sent again: whatever was taken under it, or under
    one of `lost`, is answered first. `fresh` says that this claim was not sent before, which saves
    the plane a look. `looked` says that nothing was there a moment ago.
    """

    worker_id: str
    streams: tuple[str, ...] = ()
    limit: int = 1
    wait_ms: int = 0
    claim_id: str = ""
    lost: tuple[str, ...] = ()
    fresh: bool = False
    looked: bool = False
    requester: str = ""


class Verbs(Protocol):
    """A plane, as a worker or a producer sees it."""

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; `options["stream"]` says where, else it is the first stream."""

    async def claim(self, ask: Ask) -> list[Lease]:
        """Take leases; a lease's `queue` is its stream and its `handle` the message."""

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Keep leases alive."""

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Publish news."""

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases."""

    async def upkeep(self, worker_id: str, *, slots: int = 0) -> Upkeep:
        """Do now what time made due; the worker that asks may say how many jobs it runs at once."""

    async def close(self) -> None:
        """Let go of connections."""
