"""Who keeps the history of some queues elsewhere, and how far: what they lack is not trimmed yet.

A reader has a name and, in each queue, a position. It tells after it has kept something, never
before: killed in between, it leaves rows that it has, and none goes that it lacks. What nobody came
for within `unread_days` goes all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tenure.core.errors import NotFound
from tenure.ledger.engine import OUTBOX, Engine


class Reader(msgspec.Struct, frozen=True, kw_only=True):
    """One who reads a queue's history: up to where, and when it last said so."""

    queue: str
    name: str
    position: int
    seen_ms: int


class JournalReaders:
    """The readers of some queues of one database."""

    def __init__(self, engine: Engine, queues: Sequence[str]) -> None:
        self._engine = engine
        self._queues = queues

    async def note(self, name: str, position: int) -> None:
        """Everything up to here is kept elsewhere; once it said so, a reader is waited for."""
        for queue in self._queues:
            await self._engine.run(OUTBOX, "reader_note", queue=queue, name=name, position=position)

    async def forget(self, name: str) -> None:
        """Wait for this reader no more."""
        gone = [
            row
            for queue in self._queues
            for row in await self._engine.run(OUTBOX, "reader_forget", queue=queue, name=name)
        ]
        if not gone:
            raise NotFound(f"{name} is no reader of this journal; {await self._known()}")

    async def all(self) -> list[Reader]:
        """By queue and name."""
        return [
            Reader(queue=queue, name=row["name"], position=row["position"], seen_ms=row["seen_ms"])
            for queue in self._queues
            for row in await self._engine.run(OUTBOX, "reader_list", queue=queue)
        ]

    async def _known(self) -> str:
        names = sorted({reader.name for reader in await self.all()})
        return f"it has {', '.join(names)}" if names else "nobody captures it"
