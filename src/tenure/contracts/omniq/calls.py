"""Runs the scripts on one queue, and knows what the store may have done unheard.

Every call that changes something names its caller's `instance` and says whether an earlier call of
the same instance may be unanswered. While none is, the store remembers one call's worth of what
this instance did; else it remembers more, and after a loss it looks there, so that whatever is sent
again is recognised. Nothing is sent again before its loss is known.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from tenure.contracts.omniq.options import anchor
from tenure.core.errors import ServerError, StoreUnreachable, TenureError
from tenure.store.redis import Arg, Redis
from tenure.store.resend import resend
from tenure.store.scripts import ScriptFolder

SCRIPTS = ScriptFolder("tenure.contracts.omniq")

# For so long after a loss, whatever was lost may still be sent again.
_DOUBT_S = 300.0
_UNDER_WAY, _LOST = 1, 2
_TRIES_MAX = 6
_PAUSE_S = 0.05
_PATIENCE_S = 60.0


class Calls:
    """The scripts of one queue, for one event loop."""

    def __init__(self, redis: Redis, queue: str) -> None:
        self.redis = redis
        self.instance = secrets.token_hex(6)
        self._keys = [anchor(queue)]
        self._under_way = 0
        self._doubt_until = 0.0

    async def run(self, name: str, *args: Arg) -> Any:
        """Run a script that is the same however often it runs."""
        return await self.redis.run(SCRIPTS[name], self._keys, args)

    async def remembered(self, name: str, before: tuple[Arg, ...], *args: Arg) -> Any:
        """Run a script that remembers what it did; `before` goes before instance and doubt."""
        loop = asyncio.get_running_loop()
        doubt = _UNDER_WAY if self._under_way else 0
        if loop.time() < self._doubt_until:
            doubt = _LOST
        self._under_way += 1
        try:
            return await self.run(name, *before, self.instance, doubt, *args)
        except (ServerError, StoreUnreachable):
            raise  # it was not executed, or it said what was wrong
        except (asyncio.CancelledError, TenureError):
            self._doubt_until = loop.time() + _DOUBT_S
            raise
        finally:
            self._under_way -= 1


async def insist(call: Any) -> Any:
    """Make a call again until the store answers: each of ours may be sent again.

    What is tried in vain for about two seconds is the caller's to judge.
    """
    return await resend(
        call, tries=_TRIES_MAX, patience_s=_PATIENCE_S, ends=ServerError, pause_s=_pause_s
    )


def _pause_s(attempt: int) -> float:
    return _PAUSE_S * (1 << attempt) * (0.5 + secrets.randbelow(500) / 1000)
