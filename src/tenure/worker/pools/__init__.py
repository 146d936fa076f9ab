"""Handlers outside of the event loop: a pool of threads and a pool of child processes."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from tenure.core.encoding import from_json
from tenure.core.lease import Report
from tenure.core.outcome import Outcome
from tenure.worker.config import Capacity
from tenure.worker.job import WRITTEN, Attempt, Job, Middleware, through
from tenure.worker.pools.processes import ProcessPool
from tenure.worker.settle import completed_outcome, error_of
from tenure.worker.task import Task, Where

_ThreadCall = tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]


class _ThreadPool:
    """At most `limit` calls at once; further ones wait in order.

    `concurrent.futures` is not used because it joins its threads when the interpreter ends: a
    handler that never returns would keep a stopped worker alive.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._calls: queue.SimpleQueue[_ThreadCall | None] = queue.SimpleQueue()
        self._count = 0
        self._busy = 0  # calls without an answer; only the loop's thread writes it

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run it in a thread; returns what it returns, raises what it raises.

        If the caller is cancelled the thread goes on: nothing can stop it.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        self._busy += 1
        done.add_done_callback(self._back)
        if self._busy > self._count and self._count < self.limit:
            self._count += 1
            name = f"tenure-handler-{self._count}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        self._calls.put((function, done, loop))
        return await done

    def close(self) -> None:
        """Idle threads end; busy ones end after their call."""
        for _ in range(self._count):
            self._calls.put(None)

    def _back(self, _: asyncio.Future[Any]) -> None:
        self._busy -= 1

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            function, done, loop = call
            value, error = None, None
            try:
                value = function()
            except BaseException as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(_deliver, done, value, error)
            except RuntimeError:
                return  # the loop is closed: the worker has stopped
            del call, function, done, value, error


def _deliver(done: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(value)
    elif isinstance(error, StopIteration):  # a future cannot carry it
        done.set_exception(RuntimeError(f"the handler raised {error!r}"))
    else:
        done.set_exception(error)


class HandlerPools:
    """The threads and child processes of one worker, started when first needed."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        worker_id: str,
        rng: Random,
        middleware: Sequence[Middleware] = (),
        lifespan: Where | None = None,
    ) -> None:
        self._threads = _ThreadPool(capacity.threads)
        self._processes = ProcessPool(capacity.processes, lifespan)
        self._worker_id = worker_id
        self._rng = rng
        self.run = partial(_run_inside, middleware, self._run) if middleware else self._run
        """Run a handler: its value (thread) or its outcome (process)."""

    def resize(self, capacity: Capacity) -> None:
        """Change the limits."""
        self._threads.limit = capacity.threads
        self._processes.resize(capacity.processes)

    async def _run(self, attempt: Attempt, task: Task, on_start: Callable[[Attempt], None]) -> Any:
        if task.kind == "process":
            jitter = self._rng.random()
            return await self._processes.call(attempt, task, self._worker_id, jitter, on_start)
        return await self._threads.call(_in_thread(attempt, task, on_start))

    async def close(self, grace_s: float) -> None:
        """End the children and idle threads; a thread in a handler cannot be stopped."""
        self._threads.close()
        await self._processes.close(grace_s)


_Run = Callable[[Attempt, Task, Callable[[Attempt], None]], Awaitable[Any]]


async def _run_inside(
    middleware: Sequence[Middleware],
    run: _Run,
    attempt: Attempt,
    task: Task,
    begun: Callable[[Attempt], None],
) -> Any:
    """Run a handler of a thread or process inside of middleware, which sees its value or error."""
    if task.kind == "thread":
        return await through(middleware, lambda _: run(attempt, task, begun))(attempt.job)
    outcome: Outcome
    value: Any = None
    raised: Exception | None = None

    async def call(_: Job) -> Any:
        nonlocal outcome, value, raised
        outcome = await run(attempt, task, begun)
        if outcome.kind != "complete":
            raised = error_of(outcome)
            raise raised
        value = from_json(outcome.result)
        return value

    try:
        returned = await through(middleware, call)(attempt.job)
    except Exception as error:
        if error is raised:
            return outcome
        raise
    if returned is value:
        return outcome
    return completed_outcome(attempt.lease, returned, partial(attempt.source.report, attempt))


def report_from_thread(attempt: Attempt, report: Report) -> Awaitable[None]:
    """Hand the report to the worker's loop and wait until it is written."""

    async def written() -> None:
        await attempt.source.report(attempt, report)

    asyncio.run_coroutine_threadsafe(written(), attempt.source.loop).result()
    return WRITTEN


def _in_thread(
    attempt: Attempt, task: Task, on_start: Callable[[Attempt], None]
) -> Callable[[], Any]:
    loop = asyncio.get_running_loop()
    context = contextvars.copy_context()
    job = attempt.job

    def call() -> Any:
        # Write `handler_started`, then read `stop_reason`. `Executor.end` does it in the opposite
        # order, so at least one of the two sees the other.
        attempt.handler_started = True
        if attempt.stop_reason:
            return None
        loop.call_soon_threadsafe(on_start, attempt)
        return context.run(task.run, job)

    return call
