"""Waiting for a condition with a deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable

_LOOK_EVERY_S = 0.005


async def until(holds: Callable[[], bool | Awaitable[bool]], within_s: float = 10.0) -> None:
    """Returns as soon as `holds` does; fails when it still does not after `within_s`."""
    deadline_s = time.monotonic() + within_s
    while True:
        answer = holds()
        if await answer if isinstance(answer, Awaitable) else answer:
            return
        assert time.monotonic() < deadline_s, f"{holds} still did not hold after {within_s} s"
        await asyncio.sleep(_LOOK_EVERY_S)
