"""Who may run how many jobs now: the worker's slots, shared fairly by the queues it serves.

Every queue is owed an equal share of the slots. What nobody is owed may be borrowed; but a queue
that has more work than slots (it is `hungry`: its last claim came back full) and is below its share
comes first, and nobody borrows what it is owed. A queue that was found empty keeps one slot for the
claim with which it waits, so that a busy neighbour cannot shut it out.
"""

from __future__ import annotations

import asyncio


class Share:
    """One queue's part of the slots; `in_use` counts running jobs and claims on their way.

    `claim_max` is the most that one claim of the queue brings, `most` the most slots that it may
    have (0: all).
    """

    __slots__ = ("claim_max", "hungry", "idle", "in_use", "most", "waiter")

    def __init__(self, claim_max: int, most: int) -> None:
        self.claim_max = claim_max
        self.most = most
        self.in_use = 0
        self.hungry = False
        self.idle = False
        self.waiter: asyncio.Future[None] | None = None


class Slots:
    """All slots of a worker. `take` waits for some, `give` frees them."""

    def __init__(self, total: int, *, batch_max: int) -> None:
        self.total = total
        self.used = 0
        self._shares: list[Share] = []
        self.paused = False
        self._waiting = 0
        self._closed = False
        self._batch_max = batch_max

    def share(self, claim_max: int | None = None, most: int = 0) -> Share:
        """A part for one more queue."""
        made = Share(min(claim_max or self._batch_max, self._batch_max), most)
        self._shares.append(made)
        return made

    def resize(self, total: int) -> None:
        """Have so many from now on; when there are fewer, jobs that run end first."""
        self.total = total
        self._wake()

    def pause(self, paused: bool) -> None:
        """Hand out nothing until this is taken back."""
        self.paused = paused
        self._wake()

    @property
    def crowded(self) -> bool:
        """There are more queues than slots: a claim must not hold its slot for long."""
        return len(self._shares) > self.total

    def allowance(self, share: Share) -> int:
        """How many slots this queue may take now."""
        free = min(self.total - self.used, (share.most or self.total) - share.in_use)
        if free <= 0 or self.paused:
            return 0
        # Half at most, so that a claim is under way while the batch before it is being executed.
        most = min(share.claim_max, max(1, (self.total + 1) // 2))
        if len(self._shares) == 1:
            return min(free, most)
        fair = max(1, self.total // len(self._shares))
        others = [s for s in self._shares if s is not share and s.hungry]
        owed = sum(max(0, min(fair, s.most or fair) - s.in_use) for s in others)
        limit = min(free, max(fair - share.in_use, free - owed), most)
        return min(limit, 1) if share.idle else max(limit, 0)

    async def take(self, share: Share) -> int:
        """Wait for at least one slot and take what is allowed; 0 when the worker stops."""
        while not self._closed:
            count = self.allowance(share)
            if count:
                self.used += count
                share.in_use += count
                return count
            share.waiter = asyncio.get_running_loop().create_future()
            self._waiting += 1
            await share.waiter
        return 0

    def give(self, share: Share, count: int) -> None:
        """Free slots; whoever waits looks again, those with the fewest in use first.

        A waiter runs after everything else that ends in this turn of the loop and so finds all the
        slots that were freed in it.
        """
        self.used -= count
        share.in_use -= count
        if self._waiting:
            self._wake()

    def close(self) -> None:
        """Hand out nothing more."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        waiting = [share for share in self._shares if share.waiter is not None]
        waiting.sort(key=lambda share: share.in_use)
        for share in waiting:
            if share.waiter is not None and not share.waiter.done():
                share.waiter.set_result(None)
            share.waiter = None
        self._waiting = 0
