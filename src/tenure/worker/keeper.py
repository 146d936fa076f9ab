"""Extends leases, and ends attempts whose lease is lost.

About once a second, one batched `extend` goes out for all leases of a queue. It runs in its own
thread, with its own event loop and connection, so that a handler that blocks the worker's loop does
not lose its lease. A simulation runs it in the worker's loop, without a thread.

The local deadline of a lease is the moment at which its last confirmed claim or extend was *sent*,
plus the length of the lease. When it passes without another confirmation, or when the store reports
it, the lease is lost: the attempt is ended and nothing more is written for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from tenure.core.errors import LeaseLost
from tenure.core.lease import Lease
from tenure.core.seam import Queue
from tenure.worker.claim import Contact, Context, Opener, Source
from tenure.worker.job import Attempt, StopReason

_EXTEND_BATCH_MAX = 500


class Keeper:
    """Extends the leases of one source. `beat` is the time of its last tick, for the watchdog.

    `end` and `tell` (an event of `Watch`) must be safe in the keeper's thread.
    """

    def __init__(
        self,
        source: Source,
        context: Context,
        *,
        end: Callable[[Attempt, StopReason], None],
        tell: Callable[[str, int], None],
    ) -> None:
        self._source = source
        self._clock = context.clock
        self._end = end
        self._tell = tell
        self._interval_ms_max = context.settings.keeper_ms_max
        self._contact = Contact(f"{source.name} (keeper)")
        self._wake = asyncio.Event()
        self._extending: asyncio.Task[None] | None = None
        self.beat = context.clock()

    @property
    def interval_s(self) -> float:
        """A third of the lease, so that two extends may fail before it is lost."""
        lease_ms = self._source.lease_ms or 3 * self._interval_ms_max
        return min(max(lease_ms / 3, 1), self._interval_ms_max) / 1000

    def nudge(self) -> None:
        """Tick now: the length of leases changed, and with it the interval."""
        self._wake.set()

    async def run(self, queue: Queue) -> None:
        """Tick until cancelled. An extend that hangs delays neither ticks nor deadlines."""
        try:
            while True:
                await self._sleep()
                self.beat = self._clock()
                due = self._due(self.beat)
                if due and (self._extending is None or self._extending.done()):
                    self._extending = asyncio.create_task(self._extend(queue, due))
        finally:
            if self._extending is not None:
                self._extending.cancel()

    async def _sleep(self) -> None:
        loop = asyncio.get_running_loop()
        self._wake.clear()
        alarm = loop.call_later(self.interval_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            alarm.cancel()

    def _due(self, now: float) -> list[Attempt]:
        """The attempts to extend: all that were not confirmed just now. Ends those that expired."""
        due = []
        half_s = self.interval_s / 2
        # Copied in one step: the thread of the worker's loop changes it.
        for attempt in self._source.attempts.copy():
            confirmed = attempt.until - attempt.lease.lease_ms / 1000
            if attempt.until <= now:
                self._lose(attempt)
            elif attempt.extending and now - confirmed >= half_s:
                due.append(attempt)
        return due

    async def _extend(self, queue: Queue, due: Sequence[Attempt]) -> None:
        for start in range(0, len(due), _EXTEND_BATCH_MAX):
            batch = due[start : start + _EXTEND_BATCH_MAX]
            sent = self._clock()
            try:
                answers = await queue.extend([attempt.lease for attempt in batch])
                if len(answers) != len(batch):
                    raise RuntimeError(f"{len(answers)} answers to {len(batch)} leases")
            except Exception as error:
                self._contact.failed("extend", error)
                self._tell("extend_failed", 1)
                return
            self._contact.made("extend")
            for attempt, answer in zip(batch, answers, strict=True):
                self._apply(attempt, answer, sent)
            self._tell("extended", len(batch))

    def _apply(self, attempt: Attempt, answer: Lease | LeaseLost, sent: float) -> None:
        if isinstance(answer, LeaseLost):
            if attempt.outcome_chosen:
                # Its own settle may have ended it; the flusher finds out before the deadline.
                attempt.extending = False
            else:
                self._lose(attempt)
            return
        if answer is attempt.lease:  # its part of the store did not answer: the deadline stays
            return
        attempt.lease = answer
        attempt.until = sent + answer.lease_ms / 1000
        if answer.cancel_requested and not attempt.asked_to_cancel:
            attempt.asked_to_cancel = True
            self._end(attempt, "cancel")

    def _lose(self, attempt: Attempt) -> None:
        if attempt.outcome_chosen or attempt.lost:
            return
        attempt.lost = True
        attempt.extending = False
        self._end(attempt, "lost")


class KeeperThread:
    """A thread that runs keepers, each with its own instance of the queue."""

    def __init__(
        self,
        keepers: Sequence[tuple[Keeper, Opener]],
        died: Callable[[BaseException], None],
    ) -> None:
        self._keepers = keepers
        self._died = died  # called in the keeper's thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tenure-keeper", daemon=True)

    def start(self) -> None:
        """Start the thread and wait until its loop runs."""
        self._thread.start()
        self._started.wait()

    def nudge(self, keeper: Keeper) -> None:
        """`Keeper.nudge` from another thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(keeper.nudge)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    async def stop(self, *, timeout_s: float = 2) -> None:
        """Stop extending and let the thread close its connections."""
        loop, main = self._loop, self._main
        if loop is not None and main is not None and not loop.is_closed():
            loop.call_soon_threadsafe(main.cancel)
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._died(error)
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        queues = [opener() for _, opener in self._keepers]
        self._started.set()
        try:
            await asyncio.gather(
                *(
                    keeper.run(queue)
                    for (keeper, _), queue in zip(self._keepers, queues, strict=True)
                )
            )
        finally:
            await asyncio.gather(*(queue.close() for queue in queues), return_exceptions=True)
