"""A tiny queue for tests of the worker: a shared store with scripted faults, and views on it.

Only the worker's side of the seam is of interest here; the real contracts have their own suites.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from tenure.core.errors import LeaseLost
from tenure.core.job import NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import (
    BURIED,
    CANCELLED,
    COMPLETED,
    RELEASED,
    Outcome,
    Retried,
    Verdict,
)
from tenure.core.seam import QueueFeatures, Upkeep
from tenure.worker import Worker

Fault = Callable[[Sequence[Any]], BaseException | None]

_VERDICTS: dict[str, Verdict] = {
    "complete": COMPLETED,
    "bury": BURIED,
    "cancel": CANCELLED,
    "release": RELEASED,
}


class Store:
    """What all views share. `before` faults strike instead of the step, `after` ones after it."""

    def __init__(self, *, name: str = "q", lease_ms: int = 15_000, reruns: bool = False) -> None:
        self.name = name
        self.lease_ms = lease_ms
        self.reruns = reruns
        self.waiting: deque[tuple[str, str, bytes]] = deque()
        self.outcomes: dict[str, Outcome] = {}
        self.verdicts: dict[tuple[str, int], Verdict] = {}
        self.reports: list[Report] = []
        self.attempts: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.batches: list[tuple[str, int]] = []
        self.stolen: set[str] = set()
        self.unreached: set[str] = set()
        self.cancels: set[str] = set()
        self.before: dict[str, Fault] = {}
        self.after: dict[str, Fault] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.threads: dict[str, str] = {}
        self.lock = threading.Lock()

    def add(self, task: str, count: int = 1, payload: bytes = b"{}") -> list[str]:
        """Put jobs in the queue; their ids are task-1, task-2 ..."""
        with self.lock:
            start = self.calls[f"add {task}"]
            self.calls[f"add {task}"] += count
            ids = [f"{task}-{start + number + 1}" for number in range(count)]
            self.waiting.extend((job_id, task, payload) for job_id in ids)
        return ids

    def open(self) -> View:
        """A view of its own for each opener: the worker's and the keeper's."""
        return View(self)

    def kinds(self) -> dict[str, str]:
        """What became of each job."""
        return {job_id: outcome.kind for job_id, outcome in self.outcomes.items()}

    def code(self, job_id: str) -> str:
        """The failure code a job was settled with."""
        failure = self.outcomes[job_id].failure
        return failure.code if failure else ""


class View:
    """The seam, for one event loop."""

    slots = 0
    features = QueueFeatures()

    def __init__(self, store: Store) -> None:
        self.store = store

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        for job in jobs:
            self.store.waiting.append((job.job_id, job.task, job.payload))
        return [Submitted(job.job_id, "created") for job in jobs]

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_ms / 1000
        while True:
            leases: list[Lease] = await self._step("claim", [limit], lambda: self._take(limit))
            if leases or loop.time() >= until:
                return leases
            await asyncio.sleep(min(0.002, wait_ms / 1000))

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        return await self._step("extend", leases, lambda: [self._extended(one) for one in leases])

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        return await self._step("report", reports, lambda: [self._reported(one) for one in reports])

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        return await self._step("settle", outcomes, lambda: [self._settled(o) for o in outcomes])

    async def upkeep(self) -> Upkeep:
        return await self._step("upkeep", [], Upkeep)

    async def close(self) -> None:
        self.store.calls["close"] += 1

    async def _step(self, name: str, items: Sequence[Any], step: Callable[[], Any]) -> Any:
        store = self.store
        store.calls[name] += 1
        store.threads[name] = threading.current_thread().name
        if name != "claim":
            store.batches.append((name, len(items)))
        if gate := store.gates.get(name):
            await gate.wait()
        if (strike := store.before.get(name)) and (error := strike(items)):
            raise error
        await asyncio.sleep(0)
        with store.lock:
            answer = step()
        if (strike := store.after.get(name)) and (error := strike(items)):
            raise error
        return answer

    def _take(self, limit: int) -> list[Lease]:
        leases = []
        while self.store.waiting and len(leases) < limit:
            job_id, task, payload = self.store.waiting.popleft()
            self.store.attempts[job_id] += 1
            leases.append(self._lease(job_id, task, payload))
        return leases

    def _lease(self, job_id: str, task: str, payload: bytes) -> Lease:
        attempt = self.store.attempts[job_id]
        return Lease(
            job_id=job_id,
            queue=self.store.name,
            task=task,
            payload=payload,
            attempt=attempt,
            max_attempts=3,
            fence=attempt,
            token=f"token-{attempt}",
            lease_until_ms=1_000_000 + self.store.lease_ms,
            lease_ms=self.store.lease_ms,
            created_ms=999_000,
        )

    def _extended(self, lease: Lease) -> Lease | LeaseLost:
        done = (lease.job_id, lease.fence) in self.store.verdicts
        if done or lease.job_id in self.store.stolen:
            return LeaseLost(lease.job_id)
        if lease.job_id in self.store.unreached:
            return lease
        asked = lease.job_id in self.store.cancels
        return msgspec.structs.replace(lease, cancel_requested=asked)

    def _reported(self, report: Report) -> LeaseLost | None:
        if report.lease.job_id in self.store.stolen:
            return LeaseLost(report.lease.job_id)
        self.store.reports.append(report)
        return None

    def _settled(self, outcome: Outcome) -> Verdict:
        lease, store = outcome.lease, self.store
        key = (lease.job_id, lease.fence)
        if key in store.verdicts:
            return store.verdicts[key]
        if lease.job_id in store.stolen:
            return LeaseLost(lease.job_id)
        store.outcomes[lease.job_id] = outcome
        verdict = _VERDICTS.get(outcome.kind) or Retried()
        store.verdicts[key] = verdict
        if store.reruns and outcome.kind in ("fail", "retry", "release", "snooze"):
            store.waiting.append((lease.job_id, lease.task, lease.payload))
        return verdict


@asynccontextmanager
async def serving(worker: Worker) -> AsyncGenerator[asyncio.Task[int]]:
    """Serve in the background; at the end hand everything back and wait."""
    serve = asyncio.create_task(worker.serve())
    try:
        yield serve
    finally:
        if not serve.done():
            worker.stop(at_once=True)
            await asyncio.wait_for(serve, 10)
