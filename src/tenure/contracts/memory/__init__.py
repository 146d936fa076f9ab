"""The reference contract: a whole queue in this process, for tests, trials and simulations.

`memory://name?lease_ms=15000`: everything in one process that opens the same name shares the queue,
also from other threads and event loops. It is gone when the process ends. `store` has the rules,
SPEC.md the clauses. Here are the lock around a store, and the seam.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec

from tenure.contracts.memory.machine import MACHINE
from tenure.contracts.memory.store import ClaimId, MemoryOptions, MemoryStore
from tenure.core.errors import LeaseLost, UsageError
from tenure.core.job import JobEvent, JobRecord, NewJob, Submitted
from tenure.core.journal import JournalEvent
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Verdict
from tenure.core.registry import Contract, QueueUrl
from tenure.core.seam import (
    NOW,
    Counts,
    LedgerFeatures,
    Page,
    Query,
    QueueFeatures,
    Upkeep,
    WorkerBeat,
    first_page,
)
from tenure.plans.flow import StoredFlows
from tenure.plans.schedule import StoredSchedules

T = TypeVar("T")

# Wall time that cannot jump: read once, then advanced by the monotonic clock.
_EPOCH_S = time.time() - time.monotonic()


def clock_ms() -> int:
    """Milliseconds since 1970 that never go backwards within this process."""
    return int((_EPOCH_S + time.monotonic()) * 1000)


class SharedStore:
    """A store with its lock and its waiters.

    Steps are short and never wait, so a plain lock is enough for threads and event loops. A waiter
    is a future, woken in its own event loop after every step that wrote to the journal.
    """

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._waiters: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self.records: dict[str, dict[str, str]] = {}
        self.expiries: dict[str, int] = {}

    def run(self, step: Callable[[MemoryStore], T]) -> T:
        """Run one atomic step, and wake the waiters if it changed something."""
        with self._lock:
            length = self.store.journal_length
            self.store.begin()
            answer = step(self.store)
            changed = self.store.journal_length != length
        if changed:
            self.wake()
        return answer

    def wake(self) -> None:
        """Let every waiter look again."""
        with self._lock:
            waiters, self._waiters = self._waiters, {}
        for future, loop in waiters.items():
            with suppress(RuntimeError):  # that loop was closed, and the waiter with it
                loop.call_soon_threadsafe(_finish, future)

    async def poll(self, look: Callable[[], Awaitable[list[T]]], wait_ms: int) -> list[T]:
        """Call `look` until it finds something or the time is up, and not before a change."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        while True:
            change: asyncio.Future[None] = loop.create_future()
            with self._lock:  # before the look, so that no change is missed
                self._waiters[change] = loop
            try:
                found = await look()
                left_s = deadline - loop.time()
                if found or left_s <= 0:
                    return found
                again_s = self.run(MemoryStore.wait_ms) / 1000
                await asyncio.wait([change], timeout=min(left_s, again_s))
            finally:
                with self._lock:
                    self._waiters.pop(change, None)
                change.cancel()


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_shared: dict[str, tuple[SharedStore, dict[str, str]]] = {}
_shared_lock = threading.Lock()


def _shared_store(url: QueueUrl) -> SharedStore:
    """The store of this name, made on first use; its options are those of all URLs together."""
    options, rest = url.read(MemoryOptions)
    if rest:
        raise UsageError(f"queue URL {url.safe}: memory does not know {rest!r}", contract="memory")
    name = url.text.partition("://")[2].partition("?")[0].strip("/") or "default"
    with _shared_lock:
        if name not in _shared:
            _shared[name] = SharedStore(MemoryStore(name, options, now_ms=clock_ms)), {}
        shared, given = _shared[name]
        for key, value in url.options.items():
            if given.setdefault(key, value) != value:
                raise UsageError(
                    f"queue URL {url.safe}: memory://{name} is open with {key}={given[key]}; "
                    "use the same value or another name",
                    contract="memory",
                )
        # Leases that are out keep their length until they are extended.
        current = msgspec.structs.asdict(shared.store.options)
        shared.store.options = msgspec.convert(current | given, MemoryOptions, strict=False)
    return shared


def share(shared: SharedStore) -> None:
    """Give a store that was made by hand (own clock, own rules) a name that URLs can open."""
    with _shared_lock:
        _shared[shared.store.name] = shared, {}


def forget(name: str) -> None:
    """Drop the store of this name; queues that are open keep it."""
    with _shared_lock:
        _shared.pop(name, None)


class MemoryRecords:
    """The records of one store."""

    def __init__(self, shared: SharedStore) -> None:
        self._run = shared.run
        self._groups = shared.records
        self._expiries = shared.expiries

    async def read(self, group: str) -> tuple[int, dict[str, str]]:
        return self._run(lambda store: (store.now_ms, dict(self._groups.get(group, {}))))

    async def get(self, group: str, name: str) -> str:
        return self._run(lambda store: self._groups.get(group, {}).get(name, ""))

    async def swap(
        self, group: str, name: str, before: str, after: str, *, keep_ms: int = 0
    ) -> bool:
        def step(store: MemoryStore) -> bool:
            records = self._groups.setdefault(group, {})
            if records.get(name, "") == before:
                records[name] = after
                if not after:
                    del records[name]
            if keep_ms:
                self._expire(group, store.now_ms, keep_ms)
            return records.get(name, "") == after

        return self._run(step)

    async def size(self, group: str) -> int:
        return self._run(lambda store: len(self._groups.get(group, {})))

    async def expire(self, group: str, keep_ms: int) -> None:
        self._run(lambda store: self._expire(group, store.now_ms, keep_ms))

    def _expire(self, group: str, now_ms: int, keep_ms: int) -> None:
        self._expiries[group] = now_ms + keep_ms
        for each in [group for group, ms in self._expiries.items() if ms <= now_ms]:
            self._groups.pop(each, None)
            del self._expiries[each]


class Wire(Protocol):
    """How a step reaches the store. A simulation puts a network here that loses and delays."""

    def __call__(self, operation: str, step: Callable[[MemoryStore], T], /) -> Awaitable[T]: ...


class MemoryQueue:
    """The queue for one claimer."""

    def __init__(
        self,
        shared: SharedStore,
        *,
        worker_id: str = "",
        instance: str = "",
        wire: Wire | None = None,
    ) -> None:
        self._shared = shared
        self._instance = instance or uuid.uuid4().hex
        self._worker_id = worker_id or f"anonymous-{self._instance[:8]}"
        self.slots = 0
        self._wire: Wire = wire or self._run
        self._number = 0
        self._received = 0
        self._claiming = asyncio.Lock()

    @property
    def features(self) -> QueueFeatures:
        """What it has beyond the seam."""
        records = MemoryRecords(self._shared)
        return QueueFeatures(
            contract="memory",
            schedules=StoredSchedules(records),
            flows=StoredFlows(records, self.submit),
        )

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        return await self._wire("submit", lambda store: [store.submit(job) for job in jobs])

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        return await self._shared.poll(lambda: self._claim(limit), wait_ms if limit > 0 else 0)

    async def _claim(self, limit: int) -> list[Lease]:
        async with self._claiming:
            self._number += 1
            claim = ClaimId(self._instance, self._number, self._received)
            leases = await self._wire(
                "claim", lambda store: store.claim(self._worker_id, claim, limit)
            )
            self._received = claim.number
            return leases

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        return await self._wire("extend", lambda store: [store.extend(lease) for lease in leases])

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        return await self._wire("report", lambda store: [store.report(each) for each in reports])

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        return await self._wire("settle", lambda store: [store.settle(each) for each in outcomes])

    async def upkeep(self) -> Upkeep:
        return await self._wire("upkeep", lambda store: store.upkeep(self._worker_id, self.slots))

    async def close(self) -> None:
        """Nothing is open; leases that are still held run out by themselves."""
        self._shared.run(lambda store: store.forget(self._instance))

    async def _run(self, operation: str, step: Callable[[MemoryStore], T]) -> T:
        return self._shared.run(step)


class MemoryLedger:
    """Reads and manages the jobs of one store."""

    def __init__(self, shared: SharedStore) -> None:
        self._shared = shared
        self._run = shared.run

    @property
    def features(self) -> LedgerFeatures:
        """What it has beyond the seam."""
        return LedgerFeatures(schedules=StoredSchedules(MemoryRecords(self._shared)))

    async def get(self, job_id: str) -> JobRecord | None:
        return self._run(
            lambda store: store.record(store.jobs[job_id]) if job_id in store.jobs else None
        )

    async def find(self, query: Query) -> Page:
        return self._run(lambda store: _page(store, query))

    async def counts(self) -> Counts:
        return self._run(MemoryStore.counts)

    async def workers(self) -> list[WorkerBeat]:
        return self._run(MemoryStore.workers)

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        events = self._run(
            lambda store: store.jobs[job_id].events.copy() if job_id in store.jobs else []
        )
        return first_page([each for each in events if int(each.event_id) > int(after or 0)], limit)

    async def pause(self) -> None:
        self._run(lambda store: store.pause(True))

    async def resume(self) -> None:
        self._run(lambda store: store.pause(False))

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        return self._run(lambda store: [store.retry(job_id) for job_id in job_ids])

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        return self._run(lambda store: [store.cancel(job_id) for job_id in job_ids])

    async def remove(self, job_ids: Sequence[str]) -> list[str]:
        return self._run(lambda store: [store.remove(job_id) for job_id in job_ids])

    async def probe(self) -> None:
        """Nothing can refuse a write."""

    async def close(self) -> None:
        """Nothing is open."""


def _page(store: MemoryStore, query: Query) -> Page:
    """Jobs newest first; a page ends at `limit` and goes on after its last job."""
    newest = reversed(store.jobs.values())
    if query.after:
        if query.after not in store.jobs:
            return Page([])
        next(job for job in newest if job.new.job_id == query.after)
    records: list[JobRecord] = []
    for job in newest:
        in_state = not query.states or job.state in query.states
        if in_state and (not query.task or job.new.task == query.task):
            if len(records) == query.limit:
                return Page(records, records[-1].job_id)
            records.append(store.record(job))
    return Page(records)


class MemoryJournal:
    """Reads the journal of one store; positions are counted from 1."""

    def __init__(self, shared: SharedStore) -> None:
        self._shared = shared

    async def read(self, *, after: str = "", limit: int = 1000) -> list[JournalEvent]:
        return self._shared.run(lambda store: store.read_journal(after, limit))

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        if after == NOW:
            after = self._shared.run(lambda store: str(store.journal_length))
        return await self._shared.poll(lambda: self.read(after=after), wait_ms)

    def since(self, ts_ms: int) -> str:
        return self._shared.run(lambda store: _position_before(store, ts_ms))

    async def last(self) -> str:
        return str(self._shared.run(lambda store: store.journal_length))

    async def close(self) -> None:
        """Nothing is open."""


def _position_before(store: MemoryStore, ts_ms: int) -> str:
    """The position before the first event at or after this time."""
    events = store.read_journal("", store.journal_length)
    later = (int(event.seq) for event in events if event.ts_ms >= ts_ms)
    return str(next(later, store.journal_length + 1) - 1)


CONTRACT = Contract(
    machine=MACHINE,
    open_queue=lambda url, worker_id: MemoryQueue(_shared_store(url), worker_id=worker_id),
    open_ledger=lambda url: MemoryLedger(_shared_store(url)),
    open_journal=lambda url: MemoryJournal(_shared_store(url)),
    read_options=lambda url: url.read(MemoryOptions),
    example_url="memory://name",
    is_fifo=True,
    submit_options=frozenset({"priority", "group", "ttl_s"}),
)
