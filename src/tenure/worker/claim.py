"""A queue as the worker uses it (`Source`), and the loop that claims leases for free slots."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random
from typing import Any, Protocol

import msgspec
import structlog

from tenure.core.errors import LeaseLost, ReplyLost, StoreUnreachable, UsageError
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Verdict
from tenure.core.registry import open_queue, parse_url, unique_names
from tenure.core.seam import Queue
from tenure.worker.config import Settings
from tenure.worker.events import Listeners, Metrics, Watch
from tenure.worker.job import Attempt, StopReason
from tenure.worker.settle import (
    Backoff,
    Entry,
    Flusher,
    nul_free,
    nul_free_report,
    refused_outcome,
    replaced_note,
)

log = structlog.get_logger("tenure.worker")

Opener = Callable[[], Queue]


class NamedOpener(msgspec.Struct, frozen=True):
    """How to open an instance of a queue. `address` is its URL without a password."""

    name: str
    address: str
    open: Opener


def named_openers(queues: Sequence[str | Opener], worker_id: str) -> list[NamedOpener]:
    """Openers of queues by the names that gateway and command line have for them too."""
    made = [_opener_of(queue, worker_id) for queue in queues]
    names = unique_names([each.name for each in made])
    return [
        msgspec.structs.replace(each, name=name) for each, name in zip(made, names, strict=True)
    ]


def _opener_of(queue: str | Opener, worker_id: str) -> NamedOpener:
    if isinstance(queue, str):
        url, parsed = queue, parse_url(queue)
        return NamedOpener(parsed.name, parsed.safe, lambda: open_queue(url, worker_id=worker_id))
    name = getattr(queue, "__name__", type(queue).__name__)
    return NamedOpener(name, name, queue)


class QueueSlots:
    """The slots of one queue; `in_use` counts running jobs and claims in flight.

    `claim_max` is the most leases that one claim returns, `most` the most slots that the queue may
    have (0: all). `wants_more`: the last claim returned all it asked for, so more jobs are likely
    to wait. `idle`: it returned none.
    """

    __slots__ = ("claim_max", "idle", "in_use", "most", "waiter", "wants_more")

    def __init__(self, claim_max: int, most: int) -> None:
        self.claim_max = claim_max
        self.most = most
        self.in_use = 0
        self.wants_more = False
        self.idle = False
        self.waiter: asyncio.Future[None] | None = None


class Slots:
    """All slots of a worker, shared fairly by its queues. `take` waits for some, `give` frees them.

    Every queue has a right to an equal part. A queue may borrow free slots beyond that, but not
    those that a queue with more jobs waiting still has a right to. An idle queue keeps one slot for
    its waiting claim, so that a busy queue cannot starve it.
    """

    def __init__(self, total: int, *, batch_max: int) -> None:
        self.total = total
        self.used = 0
        self._queues: list[QueueSlots] = []
        self.paused = False
        self._waiting = 0
        self._closed = False
        self._batch_max = batch_max

    def add_queue(self, claim_max: int = 0, most: int = 0) -> QueueSlots:
        """The slots of one more queue."""
        made = QueueSlots(min(claim_max or self._batch_max, self._batch_max), most)
        self._queues.append(made)
        return made

    def resize(self, total: int) -> None:
        """Change the number of slots; running jobs keep theirs until they end."""
        self.total = total
        self._wake()

    def pause(self, paused: bool) -> None:
        """Hand out no slots while paused."""
        self.paused = paused
        self._wake()

    @property
    def more_queues_than_slots(self) -> bool:
        """More queues than slots: a claim must not wait long with its slot."""
        return len(self._queues) > self.total

    def allowance(self, queue: QueueSlots) -> int:
        """How many slots this queue may take now."""
        free = min(self.total - self.used, (queue.most or self.total) - queue.in_use)
        if free <= 0 or self.paused:
            return 0
        # At most half, so that the next claim runs while this batch is being executed.
        most = min(queue.claim_max, max(1, (self.total + 1) // 2))
        if len(self._queues) == 1:
            return min(free, most)
        fair = max(1, self.total // len(self._queues))
        others = [each for each in self._queues if each is not queue and each.wants_more]
        owed = sum(max(0, min(fair, each.most or fair) - each.in_use) for each in others)
        limit = min(free, max(fair - queue.in_use, free - owed), most)
        return min(limit, 1) if queue.idle else max(limit, 0)

    async def take(self, queue: QueueSlots) -> int:
        """Wait for at least one slot and take what is allowed; 0 when the worker stops."""
        while not self._closed:
            count = self.allowance(queue)
            if count:
                self.used += count
                queue.in_use += count
                return count
            queue.waiter = asyncio.get_running_loop().create_future()
            self._waiting += 1
            await queue.waiter
        return 0

    def give(self, queue: QueueSlots, count: int) -> None:
        """Free slots and wake waiting queues, those with the fewest slots in use first.

        A waiter runs in the next turn of the loop, so it finds all slots that this turn freed.
        """
        self.used -= count
        queue.in_use -= count
        if self._waiting:
            self._wake()

    def close(self) -> None:
        """Hand out no more slots."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        waiting = [queue for queue in self._queues if queue.waiter is not None]
        waiting.sort(key=lambda queue: queue.in_use)
        for queue in waiting:
            if queue.waiter is not None and not queue.waiter.done():
                queue.waiter.set_result(None)
            queue.waiter = None
        self._waiting = 0


class Context(msgspec.Struct, frozen=True, eq=False):
    """What the parts of one worker share; `state` is what its `lifespan` yielded."""

    settings: Settings
    worker_id: str
    clock: Callable[[], float]
    rng: Random
    slots: Slots
    watch: Watch
    listeners: Listeners
    metrics: Metrics
    state: Any = None


class Contact:
    """Whether the store answers. Changes are logged, not every failure."""

    __slots__ = ("_failing", "ever", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.ever = False
        self._failing: set[str] = set()

    @property
    def answers(self) -> bool:
        """False while any operation fails."""
        return not self._failing

    def made(self, operation: str) -> bool:
        """A call was answered; True if it was the first one ever."""
        first, self.ever = not self.ever, True
        if self._failing and operation in self._failing:
            self._failing.discard(operation)
            log.info("the store answers again", source=self.name, operation=operation)
        return first

    def failed(self, operation: str, error: BaseException) -> None:
        """A call failed."""
        if operation not in self._failing:
            self._failing.add(operation)
            away = isinstance(error, StoreUnreachable)
            what = "the store is away; trying again" if away else "the store failed; trying again"
            log.warning(what, source=self.name, operation=operation, error=repr(error))


class Source:
    """One served queue: its attempts, its flushers and its slots.

    `settled` is called with the answers to outcomes, `dropped` with outcomes that are given up.
    `end` stops an attempt.
    """

    def __init__(
        self,
        name: str,
        queue: Queue,
        context: Context,
        *,
        settled: Callable[[Sequence[Entry], Sequence[Verdict]], None],
        dropped: Callable[[Entry, Exception], None],
        end: Callable[[Attempt, StopReason], None],
    ) -> None:
        self.name = name
        self.queue = queue
        self.state = context.state
        self.features = queue.features
        self.queue_slots = context.slots.add_queue(self.features.claim_max, self.features.slots_max)
        self.contact = Contact(name)
        self.attempts: dict[Attempt, None] = {}
        self.lease_ms = self.features.lease_ms
        self.loop = asyncio.get_running_loop()
        self._settings = context.settings
        self._rng = context.rng
        self._watch = context.watch
        self._end = end
        self._quarantined = context.metrics.quarantined
        if self.features.take_quarantined is not None:
            self._quarantined.setdefault(name, 0)
        queue.slots = context.slots.total
        self.settles = Flusher(
            queue.settle,
            answered=settled,
            dropped=dropped,
            failed=partial(self.failed, "settle"),
            replacement=refused_outcome,
            clock=context.clock,
            backoffs=[self.backoff() for _ in range(self.features.settles_at_once)],
            settings=context.settings,
        )
        self.reports = Flusher(
            queue.report,
            answered=self._reported,
            dropped=self._report_done,
            failed=partial(self.failed, "report"),
            clock=context.clock,
            backoffs=[self.backoff()],
            settings=context.settings,
        )

    def backoff(self) -> Backoff:
        """Pauses between tries against this queue's store."""
        return Backoff(self._rng, self._settings.backoff_ms, self._settings.backoff_ms_max)

    def failed(self, operation: str, error: BaseException) -> None:
        """A call of the store failed and will be made again."""
        self.contact.failed(operation, error)
        self._watch.tell(f"{operation}_failed")

    def answered(self, operation: str) -> None:
        """A call of the store was answered."""
        if self.contact.made(operation):
            self._watch.tell("contact")

    def note_quarantined(self) -> None:
        """Log and count the records that the queue set aside as unreadable since the last call."""
        if self.features.take_quarantined is None:
            return
        for record in self.features.take_quarantined():
            self._quarantined[self.name] += 1
            log.warning(
                "record_quarantined", queue=self.name, job_id=record.job_id, reason=record.reason
            )

    async def run_upkeep(self) -> None:
        """Run upkeep at once, which is the first contact too, then every `upkeep_ms`, jittered."""
        while True:
            try:
                await self.queue.upkeep()
            except Exception as error:
                self.contact.failed("upkeep", error)
            else:
                self.answered("upkeep")
                self.note_quarantined()
                self._watch.tell("upkeep")
            await asyncio.sleep(self._settings.upkeep_ms / 1000 * (0.75 + self._rng.random() / 2))

    def forget(self, attempt: Attempt) -> None:
        """Drop an attempt that the store has ended or whose lease is lost."""
        self.attempts.pop(attempt, None)
        attempt.job = None  # breaks the reference cycle, so that both are freed at once

    # outcomes and reports -----------------------------------------------------------------------

    def replace_nul(self, attempt: Attempt, outcome: Outcome) -> Outcome:
        """The outcome without NUL, if the store refuses it; a line in the job's log says so."""
        if self.features.holds_nul:
            return outcome
        fitted = nul_free(outcome)
        if fitted.result is not outcome.result:
            self.report(attempt, replaced_note(attempt.lease))
        return fitted

    def settle(self, attempt: Attempt, outcome: Outcome) -> None:
        """Send an outcome, after the attempt's reports."""
        entry = Entry(attempt, outcome)
        if attempt.unsent:
            attempt.pending_outcome = entry
        else:
            self.settles.add(entry)

    def report(self, attempt: Attempt, report: Report) -> Awaitable[None]:
        """Queue a report of a running attempt; the future is done when the store has it."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if report.payload and not self.features.replaces_payload:
            raise UsageError(f"a handler cannot replace the payload of a job of {self.name}")
        if attempt.outcome_chosen or attempt.lost:
            written.set_exception(LeaseLost(attempt.lease.job_id, "this attempt is over"))
            written.exception()  # else asyncio logs it if it is never awaited
            return written
        attempt.unsent += 1
        fitted = report if self.features.holds_nul else nul_free_report(report)
        self.reports.add(Entry(attempt, fitted, written))
        return written

    def _reported(self, entries: Sequence[Entry], answers: Sequence[LeaseLost | None]) -> None:
        for entry, answer in zip(entries, answers, strict=True):
            self._report_done(entry, answer)
        self.contact.made("report")
        self._watch.tell("reported", len(entries))

    def _report_done(self, entry: Entry, error: Exception | None) -> None:
        """A report was written or given up; an outcome that waited for it may be sent now.

        The handler gets the error. The attempt ends only if the lease is lost. It is marked at once
        and its handler is stopped one turn later, after `LeaseLost` was raised in it.
        """
        attempt, written = entry.attempt, entry.written
        attempt.unsent -= 1
        if written is not None and not written.done():
            if error is None:
                written.set_result(None)
            else:
                written.set_exception(error)
                written.exception()
        if attempt.pending_outcome is not None and not attempt.unsent:
            self.settles.add(attempt.pending_outcome)
            attempt.pending_outcome = None
        if isinstance(error, LeaseLost) and attempt in self.attempts and not attempt.outcome_chosen:
            attempt.lost = True
            self.loop.call_soon(self._end, attempt, "lost")


# The wait of a claim while the length of leases is unknown. A lease's local deadline counts from
# when its claim was sent, so a wait longer than the lease would lose it at once.
_WAIT_MS_UNKNOWN = 100
_WAIT_MS_SHARED = 20
_EMPTY_PAUSE_MS = 50
# Handlers whose first steps together take longer than this are assumed to block the loop.
_BLOCKING_S = 0.05
# Burst mode ends when the store has answered this many claims in a row with an error.
_REFUSALS_MAX = 3


class RunsAttempts(Protocol):
    """What becomes of claimed leases (`worker.attempt.Executor`)."""

    def adopt(self, source: Source, leases: Sequence[Lease], sent: float) -> list[Attempt]:
        """Take a slot for each lease, counted from when the claim was sent."""

    def release(self, attempts: Sequence[Attempt]) -> None:
        """Hand jobs back that were never begun."""

    def begin(self, attempts: Sequence[Attempt]) -> None:
        """Start the handlers."""


class ClaimLoop:
    """Claims for one queue, one call at a time.

    `last_empty_claim` is the `Watch.activity` when the last empty claim was sent. While `in_claim`,
    the loop must not be cancelled: the store may be handing out leases.
    """

    def __init__(
        self,
        source: Source,
        executor: RunsAttempts,
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
        self.last_empty_claim = -1

    async def run(self) -> None:
        """Claim until `stopping`; leases that arrive after that are handed back."""
        source, queue = self.source, self.source.queue_slots
        while not self.stopping:
            # If this process dies, finished but unsettled jobs run again: they must not pile up.
            if source.settles.is_retrying or source.settles.backlog > self._backlog_max:
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
            queue.wants_more, queue.idle = len(leases) >= limit, not leases
            if leases:
                await self._hand_over(leases, sent, more=queue.wants_more)
            else:
                self.last_empty_claim = seen
                self._watch.tell("claim_empty")
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
        """In burst mode, raise after several refusals: this queue never answers "empty"."""
        if isinstance(error, StoreUnreachable | ReplyLost):
            return
        self._refusals += 1
        if self._settings.burst and self._refusals >= _REFUSALS_MAX:
            raise error

    def _wait_ms(self) -> int:
        if self._settings.burst:
            return 0
        if self._slots.more_queues_than_slots:
            return _WAIT_MS_SHARED
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
            if self._watch.activity == self.last_empty_claim:
                await self._watch.next_activity(timeout_s=self._settings.claim_wait_ms / 1000)
            return
        waited_ms = (self._clock() - sent) * 1000
        pause_ms = min(self._settings.claim_wait_ms, _EMPTY_PAUSE_MS) - waited_ms
        if pause_ms > 0:
            await asyncio.sleep(pause_ms / 1000)
