"""The seam over a shared memory store: waiting, and claims that survive a lost answer."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from tenure.contracts.memory.claiming import ClaimId
from tenure.contracts.memory.sharing import SharedStore
from tenure.contracts.memory.store import MemoryStore
from tenure.core.errors import LeaseLost
from tenure.core.job import NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Verdict
from tenure.core.seam import Upkeep

T = TypeVar("T")


class Wire(Protocol):
    """How a step reaches the store. A simulation puts a network here that loses and delays."""

    def __call__(self, operation: str, step: Callable[[MemoryStore], T], /) -> Awaitable[T]: ...


class MemoryQueue:
    """One claimer's view of a memory queue."""

    def __init__(
        self,
        shared: SharedStore,
        *,
        worker_id: str = "",
        instance: str = "",
        wire: Wire | None = None,
    ) -> None:
        self._shared = shared
        self._instance = instance or uuid.uuid4().hex
        self._worker_id = worker_id or f"anonymous-{self._instance[:8]}"
        self.slots = 0
        self._wire: Wire = wire or self._directly
        self._number = 0
        self._received = 0
        self._claiming = asyncio.Lock()

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs; see `MemoryStore.submit`."""
        return await self._wire("submit", lambda store: store.submit(jobs))

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take leases, looking again whenever the store changed or time made something due."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_ms / 1000
        while True:
            with self._shared.change(of_work=True) as change:
                leases = await self._claim_now(limit)
                left = until - loop.time()
                if leases or left <= 0 or limit <= 0:
                    return leases
                await asyncio.wait([change], timeout=min(left, self._look_again_s()))

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Keep leases; see `MemoryStore.extend`."""
        return await self._wire("extend", lambda store: store.extend(leases))

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Publish news; see `MemoryStore.report`."""
        return await self._wire("report", lambda store: store.report(reports))

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases; see `MemoryStore.settle`."""
        return await self._wire("settle", lambda store: store.settle(outcomes))

    async def upkeep(self) -> Upkeep:
        """One round of upkeep; see `MemoryStore.upkeep`."""
        worker_id, slots = self._worker_id, self.slots

        def keep_up(store: MemoryStore) -> Upkeep:
            store.told(worker_id, slots)
            return store.upkeep()

        return await self._wire("upkeep", keep_up)

    async def close(self) -> None:
        """Nothing is open; leases that are still held run out by themselves."""
        self._shared.run(lambda store: store.forget(self._instance))

    async def _claim_now(self, limit: int) -> list[Lease]:
        async with self._claiming:
            self._number += 1
            claim = ClaimId(self._instance, self._number, self._received)
            leases = await self._wire(
                "claim", lambda store: store.claim(self._worker_id, claim, limit)
            )
            self._received = claim.number
            return leases

    def _look_again_s(self) -> float:
        """Seconds until time alone makes something claimable, at most a lease length.

        A lease that is taken from now on ends later than that, so looking then misses none.
        """
        return self._shared.run(_look_again_ms) / 1000

    async def _directly(self, operation: str, step: Callable[[MemoryStore], T]) -> T:
        return self._shared.run(step)


def _look_again_ms(store: MemoryStore) -> int:
    due_ms = store.next_change_ms()
    lease_ms = store.options.lease_ms
    return lease_ms if due_ms is None else min(max(due_ms - store.now_ms(), 1), lease_ms)
