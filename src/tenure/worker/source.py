"""The queues that a worker serves: what is under way with each, and how they share the slots."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import msgspec
import structlog

from tenure.core.errors import LeaseLost, StoreUnreachable, UsageError
from tenure.core.lease import Report
from tenure.core.outcome import Outcome, Verdict
from tenure.core.registry import open_queue, parse_url
from tenure.core.seam import Queue
from tenure.worker.config import Settings
from tenure.worker.events import Listeners, Watch
from tenure.worker.job import Attempt, Ending
from tenure.worker.metrics import Metrics
from tenure.worker.outcomes import nul_free, nul_free_report, refused, replaced_note
from tenure.worker.settle import Backoff, Entry, Flusher

log = structlog.get_logger("tenure.worker")

Opener = Callable[[], Queue]


def opener_of(queue: str | Opener, worker_id: str) -> tuple[str, Opener]:
    """The name to show for a queue (no password in it) and how to open an instance of it."""
    if isinstance(queue, str):
        url = queue
        return parse_url(url).safe, lambda: open_queue(url, worker_id=worker_id)
    return getattr(queue, "__name__", type(queue).__name__), queue


class Share:
    """One queue's part of the slots; `in_use` counts running jobs and claims on their way.

    `claim_max` is the most leases that one claim returns, `most` the most slots that the queue may
    have (0: all). `hungry`: the last claim came back full. `idle`: it came back empty.
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
    """All slots of a worker, shared fairly by its queues. `take` waits for some, `give` frees them.

    Every queue is owed an equal share. Unowed slots may be borrowed; but a hungry queue below its
    share comes first, and what it is owed cannot be borrowed. An idle queue keeps one slot for its
    waiting claim, so that a busy neighbour cannot shut it out.
    """

    def __init__(self, total: int, *, batch_max: int) -> None:
        self.total = total
        self.used = 0
        self._shares: list[Share] = []
        self.paused = False
        self._waiting = 0
        self._closed = False
        self._batch_max = batch_max

    def share(self, claim_max: int = 0, most: int = 0) -> Share:
        """A part for one more queue."""
        made = Share(min(claim_max or self._batch_max, self._batch_max), most)
        self._shares.append(made)
        return made

    def resize(self, total: int) -> None:
        """Change the number of slots; when there are fewer, running jobs end first."""
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
        """Free slots and wake the queues that wait, those with the fewest in use first.

        A waiter runs after everything else that ends in this turn of the loop, so it finds all the
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


class Context(msgspec.Struct, frozen=True, eq=False):
    """What the parts of one worker share."""

    settings: Settings
    worker_id: str
    clock: Callable[[], float]
    rng: Random
    slots: Slots
    watch: Watch
    listeners: Listeners
    metrics: Metrics


class Contact:
    """Whether the store answers; logs when that changes, not at every failure."""

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
        """A call was answered; True when it was the first one ever."""
        first, self.ever = not self.ever, True
        if self._failing and operation in self._failing:
            self._failing.discard(operation)
            log.info("the store answers again", source=self.name, operation=operation)
        return first

    def failed(self, operation: str, error: BaseException) -> None:
        """A call was not answered, or with an error."""
        if operation not in self._failing:
            self._failing.add(operation)
            away = isinstance(error, StoreUnreachable)
            what = "the store is away; trying again" if away else "the store failed; trying again"
            log.warning(what, source=self.name, operation=operation, error=repr(error))


class Source:
    """One queue being served: its attempts, its flushers and its share of the slots.

    `settled` and `dropped` get what became of outcomes; `end` stops an attempt.
    """

    def __init__(
        self,
        name: str,
        queue: Queue,
        context: Context,
        *,
        settled: Callable[[Sequence[Entry], Sequence[Verdict]], None],
        dropped: Callable[[Entry, Exception], None],
        end: Callable[[Attempt, Ending], None],
    ) -> None:
        self.name = name
        self.queue = queue
        self.features = queue.features
        self.share = context.slots.share(self.features.claim_max, self.features.slots_max)
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
            instead=refused,
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
        """Log and count the records that the queue has set aside since the last call."""
        if self.features.take_quarantined is None:
            return
        for record in self.features.take_quarantined():
            self._quarantined[self.name] += 1
            log.warning(
                "record_quarantined", queue=self.name, job_id=record.job_id, reason=record.reason
            )

    async def keep_up(self) -> None:
        """Upkeep at once, which also is the first contact, then every `upkeep_ms`, jittered."""
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
        """The store has ended the attempt, or its lease is lost: it is none of ours any more."""
        self.attempts.pop(attempt, None)
        attempt.job = None  # it refers to the attempt: without a cycle both are freed at once

    async def children(self, job_id: str) -> Any:
        """What the children of a job left, in the words of the queue's contract."""
        if self.features.children is None:
            raise UsageError(f"jobs of {self.name} have no children")
        return await self.features.children(job_id)

    # outcomes and reports -----------------------------------------------------------------------

    def fit(self, attempt: Attempt, outcome: Outcome) -> Outcome:
        """The outcome as this store can hold it; the job's log says where that is not the same."""
        if self.features.holds_nul:
            return outcome
        fitted = nul_free(outcome)
        if fitted.result is not outcome.result:
            self.report(attempt, replaced_note(attempt.lease))
        return fitted

    def settle(self, attempt: Attempt, outcome: Outcome) -> None:
        """Send an outcome, after the reports of the same attempt."""
        entry = Entry(attempt, outcome)
        if attempt.unsent:
            attempt.parked = entry
        else:
            self.settles.add(entry)

    def report(self, attempt: Attempt, report: Report) -> Awaitable[None]:
        """Queue news of a running attempt; the future is done when the store has it."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if report.payload and not self.features.replaces_payload:
            raise UsageError(f"a handler cannot replace the payload of a job of {self.name}")
        if attempt.concluded or attempt.lost:
            written.set_exception(LeaseLost(attempt.lease.job_id, "this attempt is over"))
            written.exception()  # so that asyncio does not complain if it is never awaited
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
        """A report is written or given up; an outcome that waited for it may go now.

        The handler gets the error. The attempt ends only if the lease is lost: it is marked at once
        and its handler stopped one turn later, when it has met its `LeaseLost`.
        """
        attempt, written = entry.attempt, entry.written
        attempt.unsent -= 1
        if written is not None and not written.done():
            if error is None:
                written.set_result(None)
            else:
                written.set_exception(error)
                written.exception()
        if attempt.parked is not None and not attempt.unsent:
            self.settles.add(attempt.parked)
            attempt.parked = None
        if isinstance(error, LeaseLost) and attempt in self.attempts and not attempt.concluded:
            attempt.lost = True
            self.loop.call_soon(self._end, attempt, "lost")
