"""The `task` decorator: what makes a function the handler of a task."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from tenure.core.errors import UsageError
from tenure.core.job import Missed, NewJob
from tenure.core.retry import RetryPolicy
from tenure.worker.job import Job
from tenure.worker.task import (
    ANY_TASK,
    BackoffFunction,
    Handler,
    Kind,
    Task,
    parameters_of,
    where,
)

P = ParamSpec("P")
R = TypeVar("R")


class Decorator(Protocol):
    """What `task(name)` returns. Type checkers see the parameters without the job."""

    @overload
    def __call__(self, handler: Callable[Concatenate[Job, P], Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, handler: Callable[Concatenate[Job, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, handler: Callable[P, Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, handler: Callable[P, R], /) -> Task[P, R]: ...


def task(
    name: str,
    *,
    timeout_s: float | None = None,
    retry: RetryPolicy | None = None,
    process: bool = False,
    backoff: BackoffFunction | None = None,
    cron: str = "",
    every_s: float | timedelta | None = None,
    tz: str = "",
    missed: Missed = "one",
) -> Decorator:
    """Make a function the handler of the jobs called `name` ("*": of all that have no other).

    `def handler(job)` gets the job itself. A handler with typed parameters gets those from the
    payload, `{"name": "Ada"}` for `def greet(name: str)`, and the job too where its first parameter
    is `job: Job`. A payload that does not fit fails the job with code "invalid_payload", and is not
    tried again. Parameters and results are what JSON has, dataclasses, msgspec structs or pydantic
    models.

    `async def` runs in the worker's loop, `def` in a thread, and with `process=True` either runs in
    a child process, the only kind that can be stopped by force. After `timeout_s` the attempt fails
    with the code "timeout". Without `retry` the job's own options in the store decide whether a
    failure is tried again. If those name a backoff that the queue does not know, `backoff` is
    called with the attempts made, the name, the error and the job; it returns ms, or -1 to give the
    job up.

    With `cron` ("0 3 * * *", in the time zone `tz`, else UTC) or `every_s` the task is scheduled:
    workers store its jobs in the first of their queues, without arguments, each time once. `missed`
    says what becomes of times at which no worker ran: nothing ("skip"), one job, or "all" of them.
    """
    if not name:
        raise UsageError('a task needs a name, as in @task("video-generation")')
    if timeout_s is not None and timeout_s <= 0:
        raise UsageError(f"task {name!r}: timeout_s is more than 0, not {timeout_s}")

    schedule = None
    if cron or every_s is not None:
        from tenure.plans.schedule import new_schedule  # few programs need it

        if name == ANY_TASK:
            raise UsageError('a scheduled task needs a name of its own, not "*"')
        job = NewJob(task=name, payload=b"{}")
        schedule = new_schedule(
            job, cron=cron, every_s=every_s, tz=tz, missed=missed, declared=True
        )

    def decorate(handler: Handler) -> Task[..., Any]:
        if isinstance(handler, Task):
            handler = handler.handler
        is_async = inspect.iscoroutinefunction(handler)
        kind: Kind = "process" if process else "async" if is_async else "thread"
        found = where(handler, f"task {name!r}: a process handler", in_process=process)
        parameters = parameters_of(handler, name)
        return Task(name, handler, kind, timeout_s, retry, found, backoff, parameters, schedule)

    return decorate  # type: ignore[return-value]  # one function for all the overloads
