"""The interface between the rest of the product and every contract: queue, ledger and journal.

A queue has seven methods. Each takes a batch, and each call is one round trip or one transaction.
Answers are per item, in the order of the request; a bad item never affects the others. Calls raise
only `StoreError` (the fate of the whole batch is unknown, and it may be sent again) or
`UsageError`. What only some contracts have is declared in `features`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import msgspec

from tenure.core.errors import LeaseLost
from tenure.core.job import Children, JobEvent, JobRecord, NewJob, Schedule, Submitted
from tenure.core.journal import JournalEvent
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Verdict


class Upkeep(msgspec.Struct, frozen=True):
    """What one round of upkeep did."""

    promoted: int = 0
    reclaimed: int = 0
    buried: int = 0
    expired: int = 0
    trimmed: int = 0


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A record that could not be read and was set aside."""

    job_id: str
    reason: str


class Records(Protocol):
    """Small texts in groups, beside a queue and in its own store; none of them is empty."""

    async def read(self, group: str) -> tuple[int, dict[str, str]]:
        """The store's time, and the records of a group by name."""

    async def get(self, group: str, name: str) -> str:
        """One record, "" if there is none."""

    async def swap(
        self, group: str, name: str, before: str, after: str, *, keep_ms: int = 0
    ) -> bool:
        """Replace a record that is `before` ("": absent) by `after` ("": removed).

        True if the record is `after` now, so the call may be sent again. With `keep_ms` the record
        may be removed after that time.
        """

    async def size(self, group: str) -> int:
        """How many records a group has."""

    async def expire(self, group: str, keep_ms: int) -> None:
        """Keep a group for this time only."""


class Schedules(Protocol):
    """The schedules of a queue."""

    async def put(self, schedule: Schedule) -> Schedule:
        """Store a schedule under its name, or change it; as it is now. Repeating it is harmless."""

    async def list(self) -> Sequence[Schedule]:
        """All schedules, the next one due first."""

    async def remove(self, name: str) -> bool:
        """Remove a schedule; False if there is none. Jobs that it has stored stay."""

    async def enqueue_due(
        self, submit: Callable[[Sequence[NewJob]], Awaitable[Sequence[Submitted]]], ahead_ms: int
    ) -> Sequence[Schedule]:
        """Store the jobs that are due within `ahead_ms`, each once; the schedules that moved on.

        Any number of workers may call it at the same time.
        """


class Flows(Protocol):
    """Jobs that wait for others: stages, each of which begins when the one before is done."""

    async def start(self, flow_id: str, stages: Sequence[Sequence[NewJob]]) -> Sequence[Submitted]:
        """Store a flow; the answers to the jobs of its first stage. Repeating it is harmless.

        The jobs get the ids `<flow>@<stage>.<number>`, counted from 0.
        """

    async def finished(self, job_id: str, result: bytes) -> Sequence[Submitted]:
        """Called before a completed job is settled: submit what waited for it, if anything did."""

    async def before(self, job_id: str) -> Sequence[str]:
        """The jobs that a job waits for, which is of a later stage and has not begun."""

    async def children(self, lease: Lease) -> Children:
        """The results of the jobs that a running job waited for."""


class QueueFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """What a queue has beyond the seven methods. Functions are None where it has no such feature.

    lease_ms          how long its leases last; 0 where only a lease can tell
    claim_max         the most leases that one claim returns; fewer mean that the queue is empty, or
                      that their payloads are large
    slots_max         the most jobs that a worker may run at once; 0: no limit
    settles_at_once   how many settles the store works on side by side
    replaces_payload  a handler can replace its job's payload
    holds_nul         text may contain NUL
    take_quarantined  the records that were set aside as unreadable since the last call
    parks             a handler may raise `Park`: its job waits for children that it has added
    custom_backoff    the name of a backoff that the queue does not know, and the attempts made
    job_options       the options that a job was added with, in the contract's own words
    contract          the name of its contract
    schedules         its schedules
    flows             jobs that wait for others
    start, drain      called by a gateway: begin background tasks; answer calls that wait for a job
    """

    lease_ms: int = 0
    claim_max: int = 0
    slots_max: int = 0
    settles_at_once: int = 1
    replaces_payload: bool = False
    holds_nul: bool = True
    take_quarantined: Callable[[], list[Quarantined]] | None = None
    parks: bool = False
    custom_backoff: Callable[[Lease], tuple[str, int] | None] | None = None
    job_options: Callable[[Lease], dict[str, Any]] | None = None
    contract: str = ""
    schedules: Schedules | None = None
    flows: Flows | None = None
    start: Callable[[], None] | None = None
    drain: Callable[[], None] | None = None


class Queue(Protocol):
    """What a worker needs of a contract. An instance belongs to one event loop."""

    slots: int
    """How many jobs its worker runs at once; upkeep tells the store. 0: unknown."""

    @property
    def features(self) -> QueueFeatures:
        """What this queue has beyond the seven methods; the same for its whole life."""

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs so that each is claimable, or say why not. Resending the same ids is safe."""

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases, waiting at most `wait_ms` for the first; [] if none or paused.

        If the answer was lost, the next claim of this instance returns the leases of the lost one.
        """

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Extend leases. It may be called every second and writes only when it is time to.

        The answer carries the new `lease_until_ms`, and whether a cancel was requested. A lease
        that could not be reached, where others could, is answered as the same object.
        """

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Publish reports of running attempts; None for each that was written."""

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases. Resending an accepted outcome gives the same verdict again."""

    async def upkeep(self) -> Upkeep:
        """Promote due jobs, take back expired leases, trim old data; every worker may call it."""

    async def close(self) -> None:
        """Close the connections; leases that are still held expire."""


class Page(msgspec.Struct, frozen=True):
    """Some jobs, newest first, and where to go on (`after` of the next query; "" at the end)."""

    jobs: list[JobRecord]
    after: str = ""


PAGE_BYTES = 4 * 1024 * 1024
"""A ledger ends a page early when its jobs or events carry this many bytes."""
READ_STEP = 25
"""How many whole jobs or events one call reads: their size is known only afterwards."""


def weight(job: JobRecord) -> int:
    """How many bytes a job carries."""
    return len(job.payload) + len(job.result) + len(job.error) + len(job.progress)


def is_full(events: Sequence[JobEvent], limit: int) -> bool:
    """Whether a page of events reached `limit` or `PAGE_BYTES`, so that more may follow."""
    return len(events) >= limit or sum(len(event.data) for event in events) >= PAGE_BYTES


def first_page(events: Sequence[JobEvent], limit: int) -> list[JobEvent]:
    """The events that one page holds; the last of them may pass `PAGE_BYTES`."""
    before = accumulate((len(event.data) for event in events), initial=0)
    return [event for event, size in zip(events[:limit], before, strict=False) if size < PAGE_BYTES]


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs to list. Empty means any; `after` continues a page."""

    states: tuple[str, ...] = ()
    task: str = ""
    after: str = ""
    limit: int = 50


class Counts(msgspec.Struct, frozen=True):
    """How many jobs are in which state now, and since the queue exists."""

    states: dict[str, int]
    totals: dict[str, int] = {}
    paused: bool = False
    workers: int = 0
    oldest_waiting_ms: int = 0


class WorkerBeat(msgspec.Struct, frozen=True):
    """A worker that is alive, as far as its store can tell. `slots` 0 means it does not say."""

    worker_id: str
    last_ms: int
    slots: int = 0


class EventWaiter(Protocol):
    """Waits for the events of many jobs at once."""

    async def wait_changes(
        self, cursors: Mapping[str, str], *, wait_ms: int
    ) -> dict[str, list[JobEvent]]:
        """The new events of many jobs, each after its cursor; waits for the first."""

    async def interrupt(self) -> None:
        """Make `wait_changes` return now."""

    async def has_foreign_workers(self) -> bool:
        """Whether workers that write no journal take jobs from the queue."""


ReadChanges: TypeAlias = Callable[
    [Mapping[str, str]], Coroutine[Any, Any, dict[str, list[JobEvent]]]
]


class LedgerFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """What a ledger has beyond the seam. Functions are None where it has no such feature.

    is_outbox   its jobs are events to be delivered
    unfinished  how many jobs of a requester have not ended, counted up to a limit
    changes     the new events of many jobs, each after its own cursor, without waiting
    waiter      waits for such events
    schedules   its schedules
    """

    is_outbox: bool = False
    unfinished: Callable[[str, int], Awaitable[int]] | None = None
    changes: ReadChanges | None = None
    waiter: EventWaiter | None = None
    schedules: Schedules | None = None


class Ledger(Protocol):
    """What gateway, dashboard and command line need of a contract."""

    @property
    def features(self) -> LedgerFeatures:
        """What this ledger has beyond the seam."""

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None if there is none (any more)."""

    async def find(self, query: Query) -> Page:
        """Jobs by state and task, in bounded steps."""

    async def counts(self) -> Counts:
        """Depths and totals of this queue."""

    async def workers(self) -> list[WorkerBeat]:
        """The workers that are alive, also those that have nothing to do."""

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """Events of one job after a cursor ("" for all), oldest first, until the page `is_full`."""

    async def pause(self) -> None:
        """Stop handing out leases; running jobs go on."""

    async def resume(self) -> None:
        """Hand out leases again."""

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Send finished jobs back to the queue; per id "ok" or why not."""

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """End waiting jobs ("ok"), running ones through their worker ("requested"); or why not."""

    async def remove(self, job_ids: Sequence[str]) -> list[str]:
        """Delete jobs that are not running; per id "ok" or why not."""

    async def probe(self) -> None:
        """Write something that changes nothing; raises `StoreError` where that is refused."""

    async def close(self) -> None:
        """Close the connections."""


NOW = "$"
"""The cursor for `Journal.wait` that skips every event before the call."""


class Journal(Protocol):
    """The ordered history of a queue. A cursor is the `seq` of an event, or made by `since`."""

    async def read(self, *, after: str = "", limit: int = 1000) -> list[JournalEvent]:
        """Events after a cursor ("" for the oldest kept), oldest first."""

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        """Like `read`, but waits for the first event; `after` may be `NOW`."""

    def since(self, ts_ms: int) -> str:
        """A cursor before every event since this time; some earlier events may follow it too."""

    async def last(self) -> str:
        """A position such that no event at or before it can still be added."""

    async def close(self) -> None:
        """Close the connections."""
