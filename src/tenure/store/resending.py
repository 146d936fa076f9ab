"""Sending again after a lost answer, and what an error says of a call that took several steps.

`StoreUnreachable` promises that nothing was executed. That holds for one step. A call that sent
something before and then cannot reach the store may have been executed: it raises `ReplyLost`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tenure.core.endpoint import Submits
from tenure.core.errors import (
    ReplyLost,
    StoreError,
    StoreUnreachable,
    TenureError,
)
from tenure.core.job import NewJob, Submitted

T = TypeVar("T")

_TRIES = 3
_PATIENCE_S = 3.0


async def resend(
    call: Callable[[], Awaitable[T]],
    *,
    tries: int,
    patience_s: float,
    ends: type[StoreError] | tuple[()] = (),
    pause_s: Callable[[int], float] | None = None,
) -> T:
    """Make a call again until it is answered; only for calls that may be executed twice.

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
    """Store jobs whose ids are chosen already: a repetition is answered with the job there is."""
    return await resend(lambda: queue.submit(jobs), tries=_TRIES, patience_s=_PATIENCE_S)


async def part(earlier: object, step: Awaitable[T]) -> T:
    """One step of a call that takes several; `earlier` is true when another was executed."""
    try:
        return await step
    except StoreUnreachable as error:
        if not earlier:
            raise
        raise ReplyLost(f"{error}; an earlier part of the call was executed") from error
