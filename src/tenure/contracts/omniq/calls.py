"""Runs the scripts of one queue, and knows which answers may have been lost.

A call that changes something names its caller's `instance` and says whether an earlier call of that
instance may be unanswered. While none is, the store remembers what the last call did; otherwise it
remembers more, and after a loss it looks there, so that a repetition is recognised.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from tenure.contracts.omniq.options import queue_base
from tenure.core.errors import ServerError, StoreUnreachable, TenureError
from tenure.store.redis import Arg, Redis
from tenure.store.resend import resend
from tenure.store.scripts import ScriptFolder

SCRIPTS = ScriptFolder("tenure.contracts.omniq")

# How long after a loss the lost call may still be sent again.
_DOUBT_S = 300.0
_UNDER_WAY, _LOST = 1, 2
_TRIES_MAX = 6
_PAUSE_S = 0.05
_PATIENCE_S = 60.0
# One script passes once over a long list, whatever it removes: a few at a time keep it short.
_STEER_MAX = 25


class Calls:
    """The scripts of one queue, for one event loop."""

    def __init__(self, redis: Redis, queue: str) -> None:
        self.redis = redis
        self.instance = secrets.token_hex(6)
        # The one key that every script is given; it names the queue and is never written.
        self._keys = [f"{queue_base(queue)}:meta"]
        self._under_way = 0
        self._doubt_until = 0.0

    async def run(self, name: str, *args: Arg) -> Any:
        """Run a script that may be repeated without harm."""
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

    async def steer(
        self,
        verb: str,
        job_ids: Sequence[str],
        *,
        lane: str = "",
        now_ms: int = 0,
        keep_failed: int = 0,
    ) -> list[str]:
        """Cancel, retry or remove jobs; OmniQ's word per id.

        The script answers AGAIN for what would block the server too long; that is sent again.
        """
        words: dict[int, str] = {}
        pending = list(range(len(job_ids)))
        while pending:
            chunk = pending[:_STEER_MAX]
            ids = [job_ids[at] for at in chunk]
            replies = await self.run("steer", now_ms, verb, lane, keep_failed, *ids)
            answered = zip(chunk, replies, strict=True)
            words |= {at: reply.decode() for at, reply in answered if reply != b"AGAIN"}
            pending = [at for at in pending if at not in words]
        return [words[at] for at in range(len(job_ids))]


async def insist(call: Any) -> Any:
    """Make a call again until the store answers, for about two seconds; each of ours may be."""
    return await resend(
        call, tries=_TRIES_MAX, patience_s=_PATIENCE_S, ends=ServerError, pause_s=_pause_s
    )


def _pause_s(attempt: int) -> float:
    return _PAUSE_S * (1 << attempt) * (0.5 + secrets.randbelow(500) / 1000)
