"""Waiting for what no event announces: looking again, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import isawaitable
from typing import Any

DEADLINE_S = 20.0
_LOOK_EVERY_S = 0.005


async def until(holds: Callable[[], Any], what: str = "", *, within_s: float = DEADLINE_S) -> Any:
    """The first true value of `holds`, which may be async; fails after the deadline."""
    try:
        async with asyncio.timeout(within_s) as deadline:
            while True:
                value = holds()
                if isawaitable(value):
                    value = await value
                if value:
                    return value
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError:
        if not deadline.expired():
            raise
        raise AssertionError(f"not within {within_s} s: {what or holds.__name__}") from None
