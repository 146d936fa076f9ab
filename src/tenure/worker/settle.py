"""Group commit: whatever finishes while one call is under way travels together in the next one.

An idle `Flusher` sends at once; under load its batches grow by themselves up to a limit. Where the
store can work on several batches side by side, a full one need not wait for the one before it. An
item counts only when the store has answered it. Until then:

    store away, reply lost   the same batch again, after a jittered pause, until each lease's local
                             deadline has passed; then the item is dropped as lost
    store answers an error   the batch is cut in halves until the poisonous items stand alone, so
                             that they harm no neighbour; they are tried a few more times, then left
                             to run out, and the store's rule for expired leases takes over
    store can never hold it  refused so twice, an outcome is replaced by one that fails the job with
                             that reason
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

import msgspec
import structlog

from tenure.core.errors import LeaseLost, ReplyLost, StoreUnreachable, UsageError
from tenure.core.retry import RetryPolicy, delay_ms
from tenure.worker.config import Settings
from tenure.worker.job import Attempt

log = structlog.get_logger("tenure.worker")

_USAGE_TRIES = 2  # a refusal for good is believed when it is repeated


class Backoff:
    """Jittered pauses between tries; each is longer than the one before, until `reset`."""

    def __init__(self, rng: Random, first_ms: int, ms_max: int) -> None:
        self._rng = rng
        self._policy = RetryPolicy(delay_ms=first_ms, delay_ms_max=ms_max, jitter="equal")
        self.tries = 0

    def pause_s(self) -> float:
        """How long to wait before the next try."""
        self.tries += 1
        return delay_ms(self._policy, self.tries, self._rng.random()) / 1000

    def reset(self) -> None:
        """It worked: begin with the shortest pause again."""
        self.tries = 0


class Entry(msgspec.Struct, eq=False):
    """One report or outcome to send. `written` is what the sender of a report waits for."""

    attempt: Attempt
    item: Any
    written: asyncio.Future[None] | None = None
    tries: int = 0


class Flusher:
    """Sends items of one kind to one queue in batches, at most one call at a time in each lane.

    There are as many lanes as `backoffs`. All but the first send full batches only: a partial batch
    is better sent together with what arrives meanwhile.

    The callbacks run in the worker's loop. `answered` gets a batch and the store's answers,
    `failed` the error of a call. `dropped` gets entries whose deadline passed (`LeaseLost`) or
    which the store keeps refusing, unless `instead` returns another item to send in its place.
    """

    def __init__(
        self,
        send: Callable[[list[Any]], Awaitable[list[Any]]],
        *,
        answered: Callable[[Sequence[Entry], Sequence[Any]], None],
        dropped: Callable[[Entry, Exception], None],
        failed: Callable[[BaseException], None],
        instead: Callable[[Any, Exception], Any] = lambda _item, _error: None,
        clock: Callable[[], float],
        backoffs: Sequence[Backoff],
        settings: Settings,
    ) -> None:
        self._send = send
        self._answered = answered
        self._dropped = dropped
        self._failed = failed
        self._instead = instead
        self._clock = clock
        self._backoffs = backoffs
        self._batch_max = settings.settle_batch_max
        self._tries_max = settings.settle_tries_max
        self._waiting: list[Entry] = []
        self._in_flight = 0
        self._ended = False
        self._wake: asyncio.Future[None] | None = None
        self._wake_full: list[asyncio.Future[None]] = []
        self._emptied: list[asyncio.Future[None]] = []

    @property
    def backlog(self) -> int:
        """How many items have no answer yet."""
        return len(self._waiting) + self._in_flight

    @property
    def troubled(self) -> bool:
        """Whether the last try of a lane failed and another one is due."""
        return any(backoff.tries > 0 for backoff in self._backoffs)

    def add(self, entry: Entry) -> None:
        """Send it with the next batch, which is now if none is under way."""
        self._waiting.append(entry)
        if self._wake is not None:
            self._wake.set_result(None)
            self._wake = None
        elif self._wake_full and len(self._waiting) >= self._batch_max:
            self._wake_full.pop().set_result(None)

    async def run(self) -> None:
        """Flush for ever; cancelling it leaves what is unanswered to run out."""
        first, *others = self._backoffs
        flows = [self._lane(first, self._any), *(self._lane(each, self._full) for each in others)]
        lanes = [asyncio.ensure_future(flow) for flow in flows]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                lane.cancel()
            self._wake, self._wake_full = None, []
            self._ended = True
            self._signal_empty()  # nobody need wait any longer

    async def _lane(self, backoff: Backoff, some: Callable[[], Awaitable[None]]) -> None:
        while True:
            await some()
            batch = self._waiting[: self._batch_max]
            del self._waiting[: self._batch_max]
            self._in_flight += len(batch)
            while batch:
                sent = len(batch)
                batch = await self._attempt(self._still_ours(batch))
                self._in_flight -= sent - len(batch)
                if batch:
                    await asyncio.sleep(backoff.pause_s())
            backoff.reset()
            if not self.backlog:
                self._signal_empty()

    async def _any(self) -> None:
        """Something waits."""
        if not self._waiting:
            self._wake = asyncio.get_running_loop().create_future()
            # Woken by the first of many that finish in this turn of the loop, it runs after
            # the last of them: that is what makes one batch of them.
            await self._wake

    async def _full(self) -> None:
        """A whole batch waits."""
        while len(self._waiting) < self._batch_max:
            wake = asyncio.get_running_loop().create_future()
            self._wake_full.append(wake)
            await wake

    async def empty(self) -> bool:
        """Return when everything has an answer; False when this flusher ended before."""
        if self.backlog and not self._ended:
            waiter = asyncio.get_running_loop().create_future()
            self._emptied.append(waiter)
            await waiter
        return not self.backlog

    async def _attempt(self, batch: list[Entry]) -> list[Entry]:
        """Send a batch and deliver its answers; returns what has to be sent again."""
        if not batch:
            return []
        try:
            answers = await self._send([entry.item for entry in batch])
            if len(answers) != len(batch):
                raise RuntimeError(f"{len(answers)} answers to a batch of {len(batch)}")
        except (StoreUnreachable, ReplyLost) as error:
            self._failed(error)
            return batch
        except Exception as error:
            self._failed(error)
            return await self._isolate(batch, error)
        self._answered(batch, answers)
        return []

    async def _isolate(self, batch: list[Entry], error: Exception) -> list[Entry]:
        if len(batch) > 1:
            half = len(batch) // 2
            again = await self._attempt(self._still_ours(batch[:half]))
            return again + await self._attempt(self._still_ours(batch[half:]))
        entry = batch[0]
        entry.tries += 1
        if entry.tries >= (_USAGE_TRIES if isinstance(error, UsageError) else self._tries_max):
            lease = entry.attempt.lease
            log.error(
                "the store refuses an item; it is given up",
                job_id=lease.job_id,
                queue=lease.queue,
                error=repr(error),
                tries=entry.tries,
            )
            entry.item, entry.tries = self._instead(entry.item, error), 0
            if entry.item is not None:
                entry.attempt.outcome = entry.item
                return batch
            self._dropped(entry, error)
            return []
        return batch

    def _still_ours(self, batch: list[Entry]) -> list[Entry]:
        """The batch without those whose lease may be somebody else's by now."""
        now = self._clock()
        ours: list[Entry] = []
        for entry in batch:
            if entry.attempt.until > now:
                ours.append(entry)
            else:
                lost = LeaseLost(entry.attempt.lease.job_id, "it ran out before the store answered")
                self._dropped(entry, lost)
        return ours

    def _signal_empty(self) -> None:
        for waiter in self._emptied:
            if not waiter.done():
                waiter.set_result(None)
        self._emptied.clear()
