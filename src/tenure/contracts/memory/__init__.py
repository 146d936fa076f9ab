"""The reference contract: a whole queue in this process, for tests, trials and simulations.

`memory://name?lease_ms=15000`: all who open the same name in one process share the queue, also from
other threads and event loops. It is gone when the process ends. SPEC.md has the clauses, `store`
the rules. Here are the lock that shares a store, and the seam over it.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, TypeAlias, TypeVar

import msgspec

from tenure.contracts.memory.job import ClaimId, MemoryOptions
from tenure.contracts.memory.store import MemoryStore
from tenure.core.errors import LeaseLost, UsageError
from tenure.core.job import JobEvent, JobRecord, NewJob, Submitted
from tenure.core.journal import JournalEvent
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome, Verdict
from tenure.core.registry import QueueUrl
from tenure.core.seam import (
    Counts,
    Journal,
    Ledger,
    Page,
    Query,
    Queue,
    Upkeep,
    WorkerBeat,
    first_page,
)

T = TypeVar("T")
_Waiters: TypeAlias = dict[asyncio.Future[None], asyncio.AbstractEventLoop]

# Wall time that cannot jump: read once, then advanced by the monotonic clock.
_EPOCH_S = time.time() - time.monotonic()


def clock_ms() -> int:
    """Milliseconds since 1970 that never go backwards within this process."""
    return int((_EPOCH_S + time.monotonic()) * 1000)


class SharedStore:
    """A store, its lock, and those who wait for work or for the next journal event.

    Steps are short and never wait, so threads and event loops share it by a plain lock. Waiters
    are woken in their own loop.
    """

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._for_work: _Waiters = {}
        self._for_news: _Waiters = {}

    def run(self, step: Callable[[MemoryStore], T]) -> T:
        """One atomic step; wakes those who wait for what it brought."""
        store = self.store
        with self._lock:
            work, news = (store.arrivals, store.paused), store.journal_length
            store.begin()
            answer = step(store)
            woken: _Waiters = {}
            if (store.arrivals, store.paused) != work:
                woken, self._for_work = self._for_work, {}
            if store.journal_length != news:
                woken, self._for_news = woken | self._for_news, {}
        _wake(woken)
        return answer

    def wake(self) -> None:
        """Let everybody look again: the clock was moved by hand."""
        with self._lock:
            woken = self._for_work | self._for_news
            self._for_work, self._for_news = {}, {}
        _wake(woken)

    @contextmanager
    def change(self, *, of_work: bool) -> Iterator[asyncio.Future[None]]:
        """A future of the running loop, done after the next change. Enter first, then look."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            (self._for_work if of_work else self._for_news)[future] = loop
        try:
            yield future
        finally:
            with self._lock:
                self._for_work.pop(future, None)
                self._for_news.pop(future, None)
            future.cancel()


def _wake(waiters: _Waiters) -> None:
    here = asyncio._get_running_loop()
    for future, loop in waiters.items():
        if loop is here:
            _done(future)
        else:
            with suppress(RuntimeError):  # that loop was closed: nobody waits there any more
                loop.call_soon_threadsafe(_done, future)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_shared: dict[str, tuple[SharedStore, dict[str, str]]] = {}
_shared_lock = threading.Lock()


def shared_store(url: QueueUrl) -> SharedStore:
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
    """Drop the store of this name; those who hold it keep it."""
    with _shared_lock:
        _shared.pop(name, None)


# The seam ---------------------------------------------------------------------------------------


class Wire(Protocol):
    """How a step reaches the store. A simulation puts a network here that loses and delays."""

    def __call__(self, operation: str, step: Callable[[MemoryStore], T], /) -> Awaitable[T]: ...


class MemoryQueue:
    """One claimer's view of a memory queue."""

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
        self._wire: Wire = wire or self._directly
        self._number = 0
        self._received = 0
        self._claiming = asyncio.Lock()

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        return await self._wire("submit", lambda store: [store.submit(job) for job in jobs])

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        """Take leases, looking again whenever the store changed or time made something due."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_ms / 1000
        while True:
            with self._shared.change(of_work=True) as change:
                leases = await self._claim_now(limit)
                left = until - loop.time()
                if leases or left <= 0 or limit <= 0:
                    return leases
                await asyncio.wait([change], timeout=min(left, self._look_again_s()))

    async def _claim_now(self, limit: int) -> list[Lease]:
        async with self._claiming:
            self._number += 1
            claim = ClaimId(self._instance, self._number, self._received)
            leases = await self._wire(
                "claim", lambda store: store.claim(self._worker_id, claim, limit)
            )
            self._received = claim.number
            return leases

    def _look_again_s(self) -> float:
        """Seconds until time alone makes something claimable, at most a lease length.

        A lease that is taken from now on ends later than that, so looking then misses none.
        """

        def wait_ms(store: MemoryStore) -> int:
            due_ms, lease_ms = store.next_change_ms(), store.options.lease_ms
            return lease_ms if due_ms is None else min(max(due_ms - store.now_ms(), 1), lease_ms)

        return self._shared.run(wait_ms) / 1000

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        return await self._wire("extend", lambda store: [store.extend(lease) for lease in leases])

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        return await self._wire(
            "report", lambda store: [store.report(report) for report in reports]
        )

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        return await self._wire(
            "settle", lambda store: [store.settle(outcome) for outcome in outcomes]
        )

    async def upkeep(self) -> Upkeep:
        worker_id, slots = self._worker_id, self.slots
        return await self._wire("upkeep", lambda store: store.upkeep(worker_id, slots))

    async def close(self) -> None:
        """Nothing is open; leases that are still held run out by themselves."""
        self._shared.run(lambda store: store.forget(self._instance))

    async def _directly(self, operation: str, step: Callable[[MemoryStore], T]) -> T:
        return self._shared.run(step)


class MemoryLedger:
    """Gets, lists and steers the jobs of one shared store."""

    def __init__(self, shared: SharedStore) -> None:
        self._run = shared.run

    async def get(self, job_id: str) -> JobRecord | None:
        return self._run(
            lambda store: store.jobs[job_id].record() if job_id in store.jobs else None
        )

    async def find(self, query: Query) -> Page:
        return self._run(lambda store: store.find(query))

    async def counts(self) -> Counts:
        return self._run(lambda store: store.counts())

    async def workers(self) -> list[WorkerBeat]:
        return self._run(lambda store: store.workers())

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        kept = self._run(
            lambda store: store.jobs[job_id].events.copy() if job_id in store.jobs else []
        )
        left = [event for event in kept if int(event.event_id) > int(after or 0)]
        return first_page(left, limit)

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

    async def close(self) -> None:
        """Nothing is open."""


class MemoryJournal:
    """Reads the shared store's events; positions are counted from 1."""

    def __init__(self, shared: SharedStore) -> None:
        self._shared = shared

    async def read(self, *, after: str = "", limit: int = 1000) -> list[JournalEvent]:
        return self._shared.run(lambda store: store.read_journal(after, limit))

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_ms / 1000
        while True:
            with self._shared.change(of_work=False) as change:
                events = await self.read(after=after)
                left = until - loop.time()
                if events or left <= 0:
                    return events
                await asyncio.wait([change], timeout=left)

    async def last(self) -> str:
        return str(self._shared.run(lambda store: store.journal_length))

    async def close(self) -> None:
        """Nothing is open."""


def open_queue(url: QueueUrl, *, worker_id: str) -> Queue:
    """The queue of this name, as one claimer sees it."""
    return MemoryQueue(shared_store(url), worker_id=worker_id)


def open_ledger(url: QueueUrl) -> Ledger:
    """The reading and steering side."""
    return MemoryLedger(shared_store(url))


def open_journal(url: QueueUrl) -> Journal:
    """The history."""
    return MemoryJournal(shared_store(url))
