"""Sends a call again after its answer was lost, and raises the right error for calls of many steps.

`StoreUnreachable` promises that nothing was executed. So a call that has executed one step and then
cannot reach the store raises `ReplyLost` instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from tenure.core.endpoint import Submits
from tenure.core.errors import (
    NotReplicated,
    ReplyLost,
    StoreError,
    StoreUnreachable,
    TenureError,
)
from tenure.core.job import NewJob, Submitted

T = TypeVar("T")


async def resend(
    call: Callable[[], Awaitable[T]],
    *,
    tries: int,
    patience_s: float,
    final_errors: type[StoreError] | tuple[()] = (),
    pause_s: Callable[[int], float] | None = None,
) -> T:
    """Make a call until it is answered; only for calls that may be executed twice.

    It gives up after `tries`, after the first failure past `patience_s`, and on an error of type
    `final_errors` or `NotReplicated`, for which the call has waited as long as its caller wanted.
    Once an answer was lost, every later failure is a `ReplyLost`.
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
            is_final = isinstance(error, (NotReplicated, final_errors))
            is_final = is_final or not isinstance(error, StoreError)
            if is_final or attempt == tries or loop.time() > until:
                if lost is None or isinstance(error, ReplyLost):
                    raise
                raise ReplyLost(f"{lost}; sent again: {error}") from error
        if pause_s is not None:
            await asyncio.sleep(pause_s(attempt))
    raise AssertionError("the last try returns or raises")


def submit_with_retry(queue: Submits, jobs: Sequence[NewJob]) -> Awaitable[list[Submitted]]:
    """Submit jobs that have ids, again if the answer is lost: the second time changes nothing."""
    return resend(partial(queue.submit, jobs), tries=3, patience_s=3.0)


async def run_step(step: Awaitable[T], *, executed_before: bool) -> T:
    """One step of a call that has several; `executed_before`: an earlier step was executed."""
    try:
        return await step
    except StoreUnreachable as error:
        if not executed_before:
            raise
        raise ReplyLost(f"{error}; an earlier part of the call was executed") from error
