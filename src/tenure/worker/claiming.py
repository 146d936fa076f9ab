"""Claim as many jobs as there are free slots, again and again, while earlier ones still run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tenure.core.errors import ReplyLost, StoreUnreachable
from tenure.core.lease import Lease
from tenure.worker.backoff import Backoff
from tenure.worker.config import Settings
from tenure.worker.execute import Executor
from tenure.worker.holding import Attempt
from tenure.worker.slots import Slots
from tenure.worker.source import Source
from tenure.worker.watching import Watch

# While no lease has told us how long leases are, a claim waits only this long: its local deadline
# counts from when it was sent, so a wait longer than the lease would lose it before it starts.
_WAIT_MS_UNKNOWN = 100
_WAIT_MS_CROWDED = 20
_EMPTY_PAUSE_MS = 50
# Handlers whose first steps together take longer than this are taken to block the loop.
_CALM_S = 0.05
# So many claims in a row that the store answered with an error end a burst.
_REFUSALS_MAX = 3


class Claimer:
    """Claims for one queue, one call at a time.

    `dry_at` is the `Watch.activity` at which a claim was sent that came back empty. While
    `in_claim` it must not be cancelled, because the store may just be giving us leases.
    """

    def __init__(
        self,
        source: Source,
        executor: Executor,
        slots: Slots,
        settings: Settings,
        *,
        clock: Callable[[], float],
        backoff: Backoff,
        watch: Watch,
        lease_changed: Callable[[], None],
    ) -> None:
        self._source = source
        self._executor = executor
        self._slots = slots
        self._settings = settings
        self._clock = clock
        self._backoff = backoff
        self._watch = watch
        self._lease_changed = lease_changed
        self._backlog_max = slots.total + 4 * settings.settle_batch_max
        self._calm = False
        self._refusals = 0
        self.stopping = False
        self.in_claim = False
        self.dry_at = -1

    async def run(self) -> None:
        """Until `stopping`; what a claim brings after that is handed back."""
        source, share = self._source, self._source.share
        while not self.stopping:
            # What is finished but unsettled runs twice if we die now: it must not pile up.
            if source.settles.troubled or source.settles.backlog > self._backlog_max:
                await source.settles.empty()
            limit = await self._slots.take(share)
            if not limit or self.stopping:
                self._slots.give(share, limit)
                return
            sent, seen = self._clock(), self._watch.activity
            self.in_claim = True
            leases = await self._claim(limit)
            self.in_claim = False
            self._slots.give(share, limit - len(leases or ()))
            if leases is None:
                await asyncio.sleep(self._backoff.pause_s())
                continue
            share.hungry, share.idle = len(leases) >= limit, not leases
            if leases:
                await self._hand_over(leases, sent, more=share.hungry)
            else:
                self.dry_at = seen
                self._watch.tell("dry")
                await self._pause(sent)

    async def _claim(self, limit: int) -> list[Lease] | None:
        """Leases, or None when the store did not answer."""
        try:
            leases = await self._source.queue.claim(limit, wait_ms=self._wait_ms())
        except Exception as error:
            self._source.contact.failed("claim", error)
            self._watch.tell("claim_failed")
            self._count_refusal(error)
            return None
        self._refusals = 0
        self._backoff.reset()
        if self._source.contact.made("claim"):
            self._watch.tell("contact")
        self._source.note_quarantined()
        return leases

    def _count_refusal(self, error: Exception) -> None:
        """A burst ends when the queue is empty; one that refuses every claim never is."""
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
        lease_ms = self._source.lease_ms
        return min(self._settings.claim_wait_ms, lease_ms // 3 if lease_ms else _WAIT_MS_UNKNOWN)

    async def _hand_over(self, leases: list[Lease], sent: float, *, more: bool) -> None:
        shortest_ms = min(lease.lease_ms for lease in leases)
        if shortest_ms != self._source.lease_ms:
            self._source.lease_ms = shortest_ms
            self._lease_changed()
        attempts = self._executor.adopt(self._source, leases, sent)
        self._watch.tell("claimed", len(leases))
        if self.stopping or self._slots.paused:
            self._executor.release(attempts)
            return
        if self._calm and more:
            # Two turns later, so that the next claim leaves before these handlers take the loop.
            asyncio.get_running_loop().call_soon(self._begin_next_turn, attempts)
            return
        # Where nothing more waits, these handlers need not wait for the next claim either. And
        # handlers that block the loop would keep us from hearing what it took until its leases
        # have run out: it does not leave before they have let go.
        began = self._clock()
        self._executor.begin(attempts)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self._feel(began)

    def _begin_next_turn(self, attempts: list[Attempt]) -> None:
        asyncio.get_running_loop().call_soon(self._begin, attempts)

    def _begin(self, attempts: list[Attempt]) -> None:
        began = self._clock()
        self._executor.begin(attempts)
        asyncio.get_running_loop().call_soon(self._feel, began)

    def _feel(self, began: float) -> None:
        self._calm = self._clock() - began < _CALM_S

    async def _pause(self, sent: float) -> None:
        """A store that answers "empty" (or "paused") without waiting must not make us spin."""
        if self._settings.burst:
            if self._watch.activity == self.dry_at:
                await self._watch.stir(timeout_s=self._settings.claim_wait_ms / 1000)
            return
        waited_ms = (self._clock() - sent) * 1000
        pause_ms = min(self._settings.claim_wait_ms, _EMPTY_PAUSE_MS) - waited_ms
        if pause_ms > 0:
            await asyncio.sleep(pause_ms / 1000)
