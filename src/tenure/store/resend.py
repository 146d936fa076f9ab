"""Sending a call again after its answer was lost, and honest errors for calls of several steps.

`StoreUnreachable` promises that nothing was executed. A call that executed one step and then cannot
reach the store must not raise it: it raises `ReplyLost`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tenure.core.endpoint import Submits
from tenure.core.errors import ReplyLost, StoreError, StoreUnreachable, TenureError
from tenure.core.job import NewJob, Submitted

T = TypeVar("T")


async def resend(
    call: Callable[[], Awaitable[T]],
    *,
    tries: int,
    patience_s: float,
    ends: type[StoreError] | tuple[()] = (),
    pause_s: Callable[[int], float] | None = None,
) -> T:
    """Makes a call until it is answered; only for calls that may be executed twice.

    Gives up after `tries`, after the first failure past `patience_s`, and when a failure is one of
    `ends`. Once an answer was lost, every later failure is a `ReplyLost`.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + patience_s
    lost: ReplyLost | None = None
    for attempt in range(1, tries + 1):
        try:
            return await call()
        except TenureError as error:
            if isinstance(error, ReplyLost):
                lost = lost or error
            hopeless = isinstance(error, ends) or not isinstance(error, StoreError)
            if hopeless or attempt == tries or loop.time() > until:
                if lost is None or isinstance(error, ReplyLost):
                    raise
                raise ReplyLost(f"{lost}; sent again: {error}") from error
        if pause_s is not None:
            await asyncio.sleep(pause_s(attempt))
    raise AssertionError("the last try returns or raises")


async def submit_surely(queue: Submits, jobs: Sequence[NewJob]) -> list[Submitted]:
    """Stores jobs that have ids already: submitting one again returns the job that is there."""
    return await resend(lambda: queue.submit(jobs), tries=3, patience_s=3.0)


async def part(earlier: object, step: Awaitable[T]) -> T:
    """One step of a call of several; `earlier` is true when another one was executed."""
    try:
        return await step
    except StoreUnreachable as error:
        if not earlier:
            raise
        raise ReplyLost(f"{error}; an earlier part of the call was executed") from error
