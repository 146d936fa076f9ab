"""How handlers are run that do not run in the loop: in a thread, or in a child process."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from tenure.core.lease import Report
from tenure.worker.children import Children
from tenure.worker.config import Capacity
from tenure.worker.holding import Attempt, Held
from tenure.worker.job import WRITTEN, ReportCall
from tenure.worker.source import Source
from tenure.worker.task import Task
from tenure.worker.threads import Threads


class Crew:
    """The threads and child processes of one worker, started when first needed."""

    def __init__(self, capacity: Capacity, *, worker_id: str, rng: Random) -> None:
        self._threads = Threads(capacity.threads)
        self._children = Children(capacity.processes)
        self._worker_id = worker_id
        self._rng = rng

    def resize(self, capacity: Capacity) -> None:
        """Have so many threads and processes at most from now on."""
        self._threads.limit = capacity.threads
        self._children.resize(capacity.processes)

    def reporter(self, source: Source) -> ReportCall:
        """A plain call that hands the report to the loop and waits until it is written."""
        loop = asyncio.get_running_loop()

        async def written(held: Held, report: Report) -> None:
            await source.report(held, report)

        def report(held: Held, news: Report) -> Awaitable[None]:
            asyncio.run_coroutine_threadsafe(written(held, news), loop).result()
            return WRITTEN

        return report

    async def run(self, attempt: Attempt, task: Task, begun: Callable[[Attempt], None]) -> Any:
        """The handler's value (thread) or its outcome (process)."""
        if task.kind == "process":
            return await self._children.call(
                attempt,
                task,
                worker_id=self._worker_id,
                chance=self._rng.random(),
                begun=begun,
            )
        return await self._threads.call(_in_thread(attempt, task, begun))

    def close(self) -> None:
        """Kill the children and let idle threads go; a thread in a handler cannot be stopped."""
        self._children.close()
        self._threads.close()


def _in_thread(attempt: Attempt, task: Task, begun: Callable[[Attempt], None]) -> Callable[[], Any]:
    loop = asyncio.get_running_loop()
    context = contextvars.copy_context()

    def call() -> Any:
        # First say so, then look: `Executor.end` writes and reads in the opposite order, so one of
        # the two always sees the other.
        attempt.held.begun = True
        if attempt.held.ended:
            return None
        loop.call_soon_threadsafe(begun, attempt)
        return context.run(task.handler, attempt.job)

    return call
