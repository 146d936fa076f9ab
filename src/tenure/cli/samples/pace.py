"""The pace of sample jobs: so many a second, fewer when nobody works them off or the store is away.

Most succeed, some need a second attempt, some fail for good.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from tenure.core.errors import StoreError

_WAITING_MAX = 30
_PAUSE_S_MAX = 2.0


async def keep_submitting(
    submit: Callable[[int], Awaitable[object]],
    waiting: Callable[[], Awaitable[int]],
    *,
    per_s: float,
    chance: random.Random,
    say: Callable[[str], None],
    pause_s_max: float = _PAUSE_S_MAX,
) -> None:
    """Call `submit` with 0, 1, 2 ... until cancelled, unless too many jobs are `waiting`."""
    away, number = False, 0
    while True:
        try:
            if await waiting() < _WAITING_MAX:
                await submit(number)
                number += 1
            away = False
        except StoreError as error:
            if not away:
                say(f"samples pause: {error}")
            away = True
        await asyncio.sleep(1.0 if away else min(chance.expovariate(per_s), pause_s_max))


def failures(chance: random.Random) -> int:
    """How often a sample shall fail: 4 in 100 for good, 12 once."""
    draw = chance.random()
    return 9 if draw < 0.04 else 1 if draw < 0.16 else 0
