"""Runs the scripts of one queue, and records which answers may have been lost.

A call whose answer was lost is sent again, and must not take effect twice. So each call that
changes something names the `instance` of its caller, and the script records under that name which
jobs the call changed (`lua/include/recent.lua`). The call also says whether earlier calls of the
instance are unanswered. If none is, the record of this call replaces the older ones. Otherwise it
is added to them. After a lost answer the script searches the records and recognises the repetition.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from tenure.contracts.omniq.options import queue_base
from tenure.core.errors import NotReplicated, ServerError, StoreUnreachable, TenureError
from tenure.store.redis import Arg, Redis, ScriptFolder
from tenure.store.resend import resend

SCRIPTS = ScriptFolder("tenure.contracts.omniq")

# How long after a lost answer the call may still be sent again.
_RESEND_S = 300.0
_PENDING, _LOST = 1, 2
_TRIES_MAX = 6
_PAUSE_S = 0.05
_PATIENCE_S = 60.0
# A script passes over a long list once, however many jobs it removes: few jobs keep it short.
_ACTION_JOBS_MAX = 25


class Calls:
    """The scripts of one queue, for one event loop."""

    def __init__(self, redis: Redis, queue: str) -> None:
        self.redis = redis
        self.instance = secrets.token_hex(6)
        # The one key of every script: it names the queue and is never written.
        self._keys = [f"{queue_base(queue)}:meta"]
        self._pending = 0
        self._resend_until = 0.0

    async def run(self, name: str, *args: Arg, replicated: bool = False) -> Any:
        """Run a script whose repetition does no harm; `replicated` as in `Redis.run`."""
        return await self.redis.run(SCRIPTS[name], self._keys, args, replicated=replicated)

    async def run_once(
        self, name: str, before: tuple[Arg, ...], *args: Arg, replicated: bool = False
    ) -> Any:
        """Run a script that recognises its repetition.

        Its arguments are `before`, the instance, whether a call is unanswered, and `args`.
        """
        loop = asyncio.get_running_loop()
        unanswered = _PENDING if self._pending else 0
        if loop.time() < self._resend_until:
            unanswered = _LOST
        self._pending += 1
        try:
            given = (*before, self.instance, unanswered, *args)
            return await self.run(name, *given, replicated=replicated)
        except (NotReplicated, ServerError, StoreUnreachable):
            raise  # it was answered, or not executed
        except (asyncio.CancelledError, TenureError):
            self._resend_until = loop.time() + _RESEND_S
            raise
        finally:
            self._pending -= 1

    async def apply_action(
        self,
        action: str,
        job_ids: Sequence[str],
        *,
        lane: str = "",
        now_ms: int = 0,
        keep_failed: int = 0,
    ) -> list[str]:
        """Cancel, retry or remove jobs; OmniQ's answer per id.

        The script answers AGAIN for jobs whose search would block the server; they are sent again.
        """
        answers: dict[int, str] = {}
        pending = list(range(len(job_ids)))
        while pending:
            chunk = pending[:_ACTION_JOBS_MAX]
            ids = [job_ids[at] for at in chunk]
            replies = await self.run("steer", now_ms, action, lane, keep_failed, *ids)
            pairs = zip(chunk, replies, strict=True)
            answers |= {at: reply.decode() for at, reply in pairs if reply != b"AGAIN"}
            pending = [at for at in pending if at not in answers]
        return [answers[at] for at in range(len(job_ids))]


async def until_answered(call: Any) -> Any:
    """Repeat a call until the store answers, for about two seconds."""
    return await resend(
        call, tries=_TRIES_MAX, patience_s=_PATIENCE_S, final_errors=ServerError, pause_s=_pause_s
    )


def _pause_s(attempt: int) -> float:
    return _PAUSE_S * (1 << attempt) * (0.5 + secrets.randbelow(500) / 1000)
