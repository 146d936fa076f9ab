"""Waking those who wait for events, after the steps that told of them and not within.

PostgreSQL lets one transaction at a time commit that notifies somebody: with a notice in every
step, steps would wait for each other's logs to be safe. A notice is no more than a hint that saves
a poll, so it follows on its own, for many steps at once, and does not wait for a log itself.
"""

from __future__ import annotations

import asyncio
import contextlib

from tenure.core.errors import StoreError
from tenure.store.postgres import Postgres

_PAUSE_S = 0.02
_NOTICE = (
    "SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, queue)"
    " FROM unnest($2::text[]) queue"
)


class PostgresRinging:
    """The notices of one engine: the first at once, more of them a moment later together."""

    def __init__(self, database: Postgres, channel: str) -> None:
        self._database = database
        self._channel = channel
        self._due: set[str] = set()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def ring(self, queue: str) -> None:
        """Soon wake whoever waits for something in this queue."""
        self._due.add(queue)
        if self._task is None:
            self._task = asyncio.create_task(self._ring())

    async def close(self) -> None:
        """Send what is due, and no more."""
        self._closing.set()
        if self._task is not None:
            await self._task

    async def _ring(self) -> None:
        try:
            while self._due:
                queues, self._due = sorted(self._due), set()
                with contextlib.suppress(StoreError):  # then they come by themselves, at their poll
                    await self._database.fetch(_NOTICE, [self._channel, queues])
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), _PAUSE_S)
        finally:
            self._task = None
