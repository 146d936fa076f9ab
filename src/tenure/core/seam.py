"""The seam between the one worker and every queue: seven methods, batches first.

Every call is one round trip or one transaction for the whole batch. Answers are per item and in
the order of the request; one bad item never harms its neighbours. Calls raise only `StoreError`
(the whole batch is unknown; every call may be sent again) or `UsageError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, runtime_checkable

import msgspec

from tenure.core.errors import LeaseLost
from tenure.core.job import JobEvent, JobRecord, NewJob, Submitted
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


class Queue(Protocol):
    """What a worker needs of a contract. An instance belongs to one event loop."""

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs so that each is claimable, or say why not. Resending the same ids is safe."""

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take up to `limit` leases, waiting at most `wait_ms` for the first; [] if none or paused.

        After a lost answer the next claim of the same instance returns what the lost one took.
        """

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Keep leases alive. Cheap enough for once a second; writes only when it is time to.

        The answer carries the new `lease_until_ms`, and whether a cancel was requested.
        """

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Publish news of running attempts; None where it was written."""

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases. Resending an accepted outcome gives the same verdict again."""

    async def upkeep(self) -> Upkeep:
        """Promote what is due, take back what ran out, trim what is old; safe from every worker."""

    async def close(self) -> None:
        """Let go of connections; leases that are still held run out by themselves."""


class Page(msgspec.Struct, frozen=True):
    """Some jobs, newest first, and where to go on (`after` of the next query; "" at the end)."""

    jobs: list[JobRecord]
    after: str = ""


PAGE_BYTES = 4 * 1024 * 1024
"""A ledger ends a page, though it is not full, when what it read for it carries so much."""
READ_STEP = 25
"""So many whole jobs or events are read in one go: what each carries is known afterwards."""


def weight(job: JobRecord) -> int:
    """How many bytes a job carries."""
    return len(job.payload) + len(job.result) + len(job.error)


def is_full(events: Sequence[JobEvent], limit: int) -> bool:
    """Whether a page of events has reached `limit` or `PAGE_BYTES`, so that more may follow."""
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


class Ledger(Protocol):
    """What gateway, dashboard and command line need of a contract."""

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None if there is none (any more)."""

    async def find(self, query: Query) -> Page:
        """Jobs by state and task, in bounded steps."""

    async def counts(self) -> Counts:
        """Depths and totals of this queue."""

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """Events of one job after a cursor ("" for all), oldest first, until the page `is_full`."""

    async def pause(self) -> None:
        """Stop handing out leases; what runs goes on."""

    async def resume(self) -> None:
        """Hand out leases again."""

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Send finished jobs back to the queue; per id "ok" or why not."""

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """End waiting jobs ("ok"), running ones through their worker ("requested"); or why not."""

    async def remove(self, job_ids: Sequence[str]) -> list[str]:
        """Delete jobs that are not running; per id "ok" or why not."""

    async def close(self) -> None:
        """Let go of connections."""


class WorkerBeat(msgspec.Struct, frozen=True):
    """A worker that is alive, as far as its store can tell. `slots` 0 means it does not say."""

    worker_id: str
    last_ms: int
    slots: int = 0


@runtime_checkable
class Staffed(Protocol):
    """A ledger that also knows the workers, those included that have nothing to do."""

    async def workers(self) -> list[WorkerBeat]:
        """The workers that are alive."""


@runtime_checkable
class Staffing(Protocol):
    """A queue that tells its store, with every upkeep, how many jobs its worker runs at once."""

    slots: int


@runtime_checkable
class Probed(Protocol):
    """A ledger that can find out whether its store takes writes, as a replica does not."""

    async def probe(self) -> None:
        """Write something that changes nothing; raises `StoreError` where that is refused."""


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """What a queue has beyond the seam. It declares a feature by an attribute of that name.

    lease_ms         how long its leases last; 0 where only a lease can tell
    claim_max        the most leases that one claim returns; fewer mean that the queue is empty
    slots_max        the most jobs that a worker may run at once; 0: no limit
    settles_at_once  how many settles the store works on side by side
    has_children     jobs can wait for children, and `children(job_id)` returns what those left
    has_data         a handler can replace its job's payload
    holds_nul        text may contain NUL
    """

    lease_ms: int = 0
    claim_max: int = 0
    slots_max: int = 0
    settles_at_once: int = 1
    has_children: bool = False
    has_data: bool = False
    holds_nul: bool = True


def features(queue: Queue) -> Features:
    """What this queue declares, the defaults for the rest."""
    names = Features.__struct_fields__
    return Features(**{name: getattr(queue, name) for name in names if hasattr(queue, name)})


class Journal(Protocol):
    """The ordered history of a queue, read by position."""

    async def read(self, *, after: str = "", limit: int = 1000) -> list[JournalEvent]:
        """Events after a position ("" for the oldest kept), oldest first."""

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        """Like `read`, but waits for the first event."""

    async def last(self) -> str:
        """A position that no event before it can still be added to: everything later is new."""

    async def close(self) -> None:
        """Let go of connections."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A record that could not be read and was set aside."""

    job_id: str
    reason: str


@runtime_checkable
class Quarantining(Protocol):
    """A queue that sets unreadable records aside instead of handing them out."""

    def take_quarantined(self) -> list[Quarantined]:
        """What was set aside since the last call."""
