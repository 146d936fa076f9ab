"""The claim loop: claim as many jobs as there are free slots, while earlier ones still run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tenure.core.errors import ReplyLost, StoreUnreachable
from tenure.core.lease import Lease
from tenure.worker.attempt import Executor
from tenure.worker.job import Attempt
from tenure.worker.source import Context, Source

# The wait of a claim while the length of leases is unknown. A lease's local deadline counts from
# when its claim was sent, so a wait longer than the lease would lose it at once.
_WAIT_MS_UNKNOWN = 100
_WAIT_MS_CROWDED = 20
_EMPTY_PAUSE_MS = 50
# Handlers whose first steps together take longer than this are assumed to block the loop.
_BLOCKING_S = 0.05
# A burst ends after so many claims in a row that the store answered with an error.
_REFUSALS_MAX = 3


class Claimer:
    """Claims for one queue, one call at a time.

    `dry_at` is the `Watch.activity` when the last empty claim was sent. While `in_claim`, the loop
    must not be cancelled: the store may be handing out leases.
    """

    def __init__(
        self,
        source: Source,
        executor: Executor,
        context: Context,
        lease_changed: Callable[[], None],
    ) -> None:
        self.source = source
        self._executor = executor
        self._slots = context.slots
        self._settings = context.settings
        self._clock = context.clock
        self._watch = context.watch
        self._backoff = source.backoff()
        self._lease_changed = lease_changed
        self._backlog_max = context.slots.total + 4 * context.settings.settle_batch_max
        self._handlers_block = True  # until they were measured
        self._refusals = 0
        self.stopping = False
        self.in_claim = False
        self.dry_at = -1

    async def run(self) -> None:
        """Claim until `stopping`; leases that arrive after that are handed back."""
        source, queue = self.source, self.source.queue_slots
        while not self.stopping:
            # If this process dies, finished but unsettled jobs run again: they must not pile up.
            if source.settles.troubled or source.settles.backlog > self._backlog_max:
                await source.settles.empty()
            limit = await self._slots.take(queue)
            if not limit or self.stopping:
                self._slots.give(queue, limit)
                return
            sent, seen = self._clock(), self._watch.activity
            self.in_claim = True
            leases = await self._claim(limit)
            self.in_claim = False
            self._slots.give(queue, limit - len(leases or ()))
            if leases is None:
                await asyncio.sleep(self._backoff.pause_s())
                continue
            queue.hungry, queue.idle = len(leases) >= limit, not leases
            if leases:
                await self._hand_over(leases, sent, more=queue.hungry)
            else:
                self.dry_at = seen
                self._watch.tell("dry")
                await self._pause(sent)

    async def _claim(self, limit: int) -> list[Lease] | None:
        """Leases, or None when the store did not answer."""
        try:
            leases = await self.source.queue.claim(limit, wait_ms=self._wait_ms())
        except Exception as error:
            self.source.failed("claim", error)
            self._count_refusal(error)
            return None
        self._refusals = 0
        self._backoff.reset()
        self.source.answered("claim")
        self.source.note_quarantined()
        return leases

    def _count_refusal(self, error: Exception) -> None:
        """End a burst whose queue refuses every claim: such a queue never gets empty."""
        if isinstance(error, StoreUnreachable | ReplyLost):
            return
        self._refusals += 1
        if self._settings.burst and self._refusals >= _REFUSALS_MAX:
            raise error

    def _wait_ms(self) -> int:
        if self._settings.burst:
            return 0
        if self._slots.crowded:
            return _WAIT_MS_CROWDED
        lease_ms = self.source.lease_ms
        return min(self._settings.claim_wait_ms, lease_ms // 3 if lease_ms else _WAIT_MS_UNKNOWN)

    async def _hand_over(self, leases: list[Lease], sent: float, *, more: bool) -> None:
        shortest_ms = min(lease.lease_ms for lease in leases)
        if shortest_ms != self.source.lease_ms:
            self.source.lease_ms = shortest_ms
            self._lease_changed()
        attempts = self._executor.adopt(self.source, leases, sent)
        self._watch.tell("claimed", len(leases))
        if self.stopping or self._slots.paused:
            self._executor.release(attempts)
            return
        loop = asyncio.get_running_loop()
        if more and not self._handlers_block:
            # Two turns later, so that the next claim is sent before these handlers take the loop.
            loop.call_soon(loop.call_soon, self._begin, attempts)
            return
        # If the queue is empty, these handlers need not wait for the next claim. If handlers block
        # the loop, the next claim must be sent after them: its answer would be read too late, after
        # its leases have expired.
        self._begin(attempts)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def _begin(self, attempts: list[Attempt]) -> None:
        began = self._clock()
        self._executor.begin(attempts)
        asyncio.get_running_loop().call_soon(self._measure, began)

    def _measure(self, began: float) -> None:
        self._handlers_block = self._clock() - began >= _BLOCKING_S

    async def _pause(self, sent: float) -> None:
        """Do not spin on a store that answers "empty" or "paused" without waiting."""
        if self._settings.burst:
            if self._watch.activity == self.dry_at:
                await self._watch.next_activity(timeout_s=self._settings.claim_wait_ms / 1000)
            return
        waited_ms = (self._clock() - sent) * 1000
        pause_ms = min(self._settings.claim_wait_ms, _EMPTY_PAUSE_MS) - waited_ms
        if pause_ms > 0:
            await asyncio.sleep(pause_ms / 1000)
