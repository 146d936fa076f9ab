"""The history of a memory queue, read by position."""

from __future__ import annotations

import asyncio

from tenure.contracts.memory.sharing import SharedStore
from tenure.core.event import JournalEvent

READ_MAX = 1000


class MemoryJournal:
    """Reads the shared store's events; positions are counted from 1."""

    def __init__(self, shared: SharedStore) -> None:
        self._shared = shared

    async def read(self, *, after: str = "", limit: int = READ_MAX) -> list[JournalEvent]:
        """Events after a position."""
        return self._shared.run(lambda store: store.contents.history.read(after, limit))

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        """Like `read`, but waits for the first event."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_ms / 1000
        while True:
            with self._shared.change(of_work=False) as change:
                events = await self.read(after=after)
                left = until - loop.time()
                if events or left <= 0:
                    return events
                await asyncio.wait([change], timeout=left)

    async def close(self) -> None:
        """Nothing is open."""
