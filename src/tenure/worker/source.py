"""One queue that the worker serves, and all that is under way with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from tenure.core.errors import LeaseLost, StoreUnreachable, UsageError
from tenure.core.lease import Lease, Report
from tenure.core.opening import open_queue, parse_url
from tenure.core.outcome import Outcome
from tenure.core.quarantine import Quarantining
from tenure.core.seam import Queue, Staffing
from tenure.worker.holding import Attempt, Held
from tenure.worker.outcomes import noted, nul_free, nul_free_report
from tenure.worker.settling import Entry, Flusher
from tenure.worker.slots import Share

log = structlog.get_logger("tenure.worker")

Opener = Callable[[], Queue]


def opener_of(queue: str | Opener, worker_id: str) -> tuple[str, Opener]:
    """The name to show for a queue (no password in it) and how to open an instance of it."""
    if isinstance(queue, str):
        url = queue
        return parse_url(url).safe, lambda: open_queue(url, worker_id=worker_id)
    return getattr(queue, "__name__", type(queue).__name__), queue


class Contact:
    """Whether the store answers; says so in the log when it changes, not at every failure."""

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
    """A queue instance with its leases, flushers and share of the slots."""

    def __init__(
        self,
        name: str,
        queue: Queue,
        share: Share,
        *,
        slots: int = 0,
        quarantined: dict[str, int] | None = None,
    ) -> None:
        self.name = name
        self.queue = queue
        self.share = share
        self.tell_slots(slots)
        self._take_quarantined = queue.take_quarantined if isinstance(queue, Quarantining) else None
        self._quarantined = {} if quarantined is None else quarantined
        if self._take_quarantined is not None:
            self._quarantined.setdefault(name, 0)
        self.contact = Contact(name)
        self.held: dict[Held, Attempt] = {}
        self.lease_ms = int(getattr(queue, "lease_ms", 0) or 0)
        self.has_children = bool(getattr(queue, "has_children", False))
        self.holds_nul = bool(getattr(queue, "holds_nul", True))
        self.loop: asyncio.AbstractEventLoop | None = None
        self.settles: Flusher
        self.reports: Flusher

    def note_quarantined(self) -> None:
        """Log and count the records that the queue has set aside since the last call."""
        if self._take_quarantined is None:
            return
        for record in self._take_quarantined():
            self._quarantined[self.name] += 1
            log.warning(
                "record_quarantined", queue=self.name, job_id=record.job_id, reason=record.reason
            )

    def tell_slots(self, slots: int) -> None:
        """Let the store know how many jobs run at once, where it wants to."""
        if isinstance(self.queue, Staffing):
            self.queue.slots = slots

    def report(self, held: Held, report: Report) -> Awaitable[None]:
        """Queue news of a running attempt; the future is done when the store has it."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if report.payload and not getattr(self.queue, "has_data", False):
            raise UsageError(f"a handler cannot replace the payload of a job of {self.name}")
        if held.concluded or held.lost:
            written.set_exception(LeaseLost(held.lease.job_id, "this attempt is over"))
            written.exception()  # whoever does not await it does not want to be told
            return written
        held.unsent += 1
        self.reports.add(Entry(held, self._fitted(report), written))
        return written

    def _fitted(self, report: Report) -> Report:
        return report if self.holds_nul else nul_free_report(report)

    def fit(self, held: Held, outcome: Outcome) -> Outcome:
        """The outcome as this store can hold it; the job's log says where that is not the same."""
        if self.holds_nul:
            return outcome
        fitted = nul_free(outcome)
        if fitted.result is not outcome.result:
            self.report(held, noted(held.lease))
        return fitted

    async def children(self, job_id: str) -> Any:
        """What the children of a job left, in the words of the queue's contract."""
        if not self.has_children:
            raise UsageError(f"jobs of {self.name} have no children")
        return await self.queue.children(job_id)  # type: ignore[attr-defined]

    def custom_backoff(self, lease: Lease) -> tuple[str, int] | None:
        """The name of a backoff that the queue does not know, and the attempts made by now."""
        ask = getattr(self.queue, "custom_backoff", None)
        return ask(lease) if ask is not None else None

    def settle(self, entry: Entry) -> None:
        """Send an outcome, after the reports of the same attempt."""
        if entry.held.unsent:
            entry.held.parked = entry
        else:
            self.settles.add(entry)

    def report_done(self, entry: Entry, error: BaseException | None) -> None:
        """A report is written or given up; an outcome that waited for it may go now."""
        held, written = entry.held, entry.owner
        held.unsent -= 1
        if not written.done():
            if error is None:
                written.set_result(None)
            else:
                written.set_exception(error)
                written.exception()
        if held.parked is not None and not held.unsent:
            self.settles.add(held.parked)
            held.parked = None
