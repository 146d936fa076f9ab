"""Where an idle worker waits: BullMQ's `marker`, a sorted set that producers ring like a bell.

The member "0" says that there is work, "1" when the next delayed job is due. Popping takes the
ring away from every other worker, so one that nobody here waits for any more is given back. The
server ends a blocking call up to a tenth of a second late; a timer of our own is exact, and leaves
the call pending for the next wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from tenure.core.errors import StoreError
from tenure.store.redis import Redis

_BLOCK_S = 5.0


class Bell:
    """Waits for the marker of one queue. `redis` lends the connection that blocks."""

    def __init__(self, redis: Redis, marker: str) -> None:
        self._redis = redis
        self._marker = marker
        self._pending: asyncio.Task[Any] | None = None
        self._given_back: asyncio.Task[None] | None = None
        self._listeners = 0

    async def wait(self, wait_s: float, *, until_ms: float) -> None:
        """Return when there may be work, or when the time is up, which is `until_ms` there."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        self._listeners += 1
        try:
            while (left_s := deadline - loop.time()) > 0:
                popped = await self._rung(left_s)
                if popped is None or popped[1] == b"0":
                    return
                # A due time: the wait ends then at the latest.
                sooner_s = (until_ms - float(popped[2])) / 1000
                if sooner_s > 0:
                    until_ms = float(popped[2])
                    deadline -= sooner_s
        finally:
            self._listeners -= 1

    async def close(self) -> None:
        """Stop waiting."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)
        if self._given_back is not None:
            await asyncio.gather(self._given_back, return_exceptions=True)

    async def _rung(self, wait_s: float) -> Any:
        """What the marker said, or None when nothing was heard in time."""
        task = self._pending
        if task is None or task.done():
            task = self._pending = asyncio.create_task(self._block())
            task.add_done_callback(self._ended)
        done, _ = await asyncio.wait({task}, timeout=wait_s)
        return task.result() if done else None

    async def _block(self) -> Any:
        return await self._redis.block(
            "BZPOPMIN", self._marker, f"{_BLOCK_S:.0f}", wait_ms=round(_BLOCK_S * 1000)
        )

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is not None or task.result() is None:
            return
        if self._listeners == 0:
            self._given_back = asyncio.create_task(self._give_back(task.result()))

    async def _give_back(self, popped: Any) -> None:
        with contextlib.suppress(StoreError):
            await self._redis.call("ZADD", self._marker, popped[2], popped[1])
