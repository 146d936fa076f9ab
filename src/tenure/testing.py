"""Tests without a store: one task by itself, or client and worker over a queue in memory.

async def test_it_greets() -> None:
    assert await run_task(greet, name="Ada") == Greeting("Hello, Ada")

async def test_it_is_greeted_by_a_worker() -> None:
    async with serving(greet) as queue:
        handle = await queue.client.submit(greet, name="Ada")
        assert await handle.result(timeout_s=5) == Greeting("Hello, Ada")
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from tenure.client.client import Client
from tenure.contracts.memory import SharedStore, clock_ms, forget, share
from tenure.contracts.memory.store import MemoryOptions, MemoryStore
from tenure.core.convert import payload_of, result_decoder
from tenure.core.encoding import from_json, storable_json
from tenure.core.job import Children
from tenure.core.lease import Lease, Report
from tenure.worker import Job, Settings, Task, Worker
from tenure.worker.job import WRITTEN, AskVerb, Attempt, Lifespan, Middleware, StopReason

__all__ = ["Clock", "FakeJob", "MemoryQueue", "run_task", "serving"]

_numbers = itertools.count(1)
_LEASE_MS = 60_000


@dataclass
class FakeJob:
    """What `run_task` gives a handler as its job, and what the handler reported.

    `state` is what a worker's `lifespan` would yield, `children` are the results that it sees as
    its children's. `reports` are (type, step, progress, data) in order, `submitted` (task, payload,
    options) of the jobs that it submitted.
    """

    id: str = "job-1"
    task: str = "task"
    attempt: int = 1
    max_attempts: int = 1
    payload: Any = None
    state: Any = None
    children: Sequence[Any] = ()
    reports: list[tuple[str, str, Any, Any]] = field(default_factory=list)
    submitted: list[tuple[str, Any, dict[str, Any]]] = field(default_factory=list)
    _ending: StopReason = field(default="", repr=False)
    _attempts: list[Attempt] = field(default_factory=list, repr=False)

    def cancel(self) -> None:
        """Ask the handler to stop, before it begins or while it runs: `job.cancelled` is True."""
        self._ending = "cancel"
        for attempt in self._attempts:
            attempt.stop_reason = "cancel"

    def job(self) -> Job:
        """The job as the handler sees it."""
        lease = Lease(
            job_id=self.id,
            queue="testing",
            task=self.task,
            payload=payload_of(self.payload, self.task),
            attempt=self.attempt,
            max_attempts=self.max_attempts,
            fence=self.attempt,
            token="testing",
            lease_until_ms=clock_ms() + _LEASE_MS,
            lease_ms=_LEASE_MS,
        )
        attempt = Attempt(lease, float("inf"), time.monotonic(), stop_reason=self._ending)
        self._attempts.append(attempt)
        return Job(attempt, self._report, "testing", _ask=self._ask, _state=self.state)

    async def _ask(self, attempt: Attempt, verb: AskVerb, argument: bytes) -> Any:
        if verb == "children":
            results = {f"child-{number}": each for number, each in enumerate(self.children)}
            return Children(results=results)
        call = from_json(argument)
        options = dict(call["options"])
        job_id = options.pop("id")
        self.submitted.append((call["task"], from_json(call["payload"].encode()), options))
        return job_id

    def _report(self, attempt: Attempt, report: Report) -> Awaitable[None]:
        progress = from_json(report.progress) if report.progress else None
        self.reports.append((report.type, report.step, progress, from_json(report.data)))
        return WRITTEN


async def run_task(task: Task[..., Any], /, *, job: FakeJob | None = None, **payload: Any) -> Any:
    """Run a task's handler once as a worker would, without a queue; what it returns.

    The payload goes through JSON and the handler's types, and so does the result. What the handler
    raises is raised here; a payload that does not fit raises `Fatal`. `job` shows afterwards what
    the handler reported.
    """
    fake = job or FakeJob()
    fake.task, fake.payload = task.name, payload
    if task.kind == "async":
        value = await task.run(fake.job())
    else:
        value = await asyncio.to_thread(task.run, fake.job())
        if inspect.isawaitable(value):  # an `async def` handler of a process
            value = await value
    return result_decoder(task.result_type)(storable_json(value)[0])


class Clock:
    """Time of a queue in memory: it passes as usual, and further with `advance`."""

    def __init__(self) -> None:
        self._ahead_ms = 0
        self._woken: list[Any] = []

    def __call__(self) -> int:
        return clock_ms() + self._ahead_ms

    def advance(self, seconds: float | timedelta) -> None:
        """Let time pass: delayed jobs and retries become due, times to live run out."""
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        self._ahead_ms += round(seconds * 1000)
        for wake in self._woken:
            wake()


@dataclass(frozen=True)
class MemoryQueue:
    """A queue in memory with a client, a worker that serves it, and its clock."""

    url: str
    client: Client
    worker: Worker
    clock: Clock


@asynccontextmanager
async def serving(
    *tasks: Task[..., Any],
    lifespan: Lifespan | None = None,
    middleware: Sequence[Middleware] = (),
    **options: int,
) -> AsyncIterator[MemoryQueue]:
    """A queue of its own in memory, with a worker of these tasks in this event loop.

    `lifespan` and `middleware` are those of `Worker`, `options` those of a `memory://` URL, such as
    `max_attempts=1`. The worker is drained at the end, and the queue is forgotten.

        @pytest.fixture
        async def queue():
            async with serving(greet) as queue:
                yield queue
    """
    clock, name = Clock(), f"testing-{next(_numbers)}"
    shared = SharedStore(MemoryStore(name, MemoryOptions(**options), now_ms=clock))
    clock._woken.append(shared.wake)
    share(shared)
    url = f"memory://{name}"
    # No thread besides the test's own: leases are kept by the same loop.
    settings = Settings(keeper_threaded=False, upkeep_ms=50)
    worker = Worker(
        tasks, queues=[url], lifespan=lifespan, middleware=middleware, settings=settings
    )
    serve = asyncio.create_task(worker.serve())
    try:
        async with Client(url) as client:
            yield MemoryQueue(url, client, worker, clock)
    finally:
        worker.stop()
        await serve
        forget(name)
