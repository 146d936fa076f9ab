"""The history of a plane: the journals of its streams as one, in the contract's words."""

from __future__ import annotations

import asyncio

import msgspec

from tenure.contracts.plane.model import CONTRACT, STATES, PlaneOptions, queue_of, stream_of
from tenure.core.journal import JournalEvent, SqlFormat
from tenure.sql.engine import PLANE, Engine
from tenure.sql.sql_ledger import EVENT_FIELDS, SqlJournal

_LOOK_MS = 250


class PlaneJournal:
    """The events of all streams in the order in which the database numbered them."""

    def __init__(self, engine: Engine, options: PlaneOptions) -> None:
        self._engine = engine
        self._parts = [SqlJournal(engine, options.settings(name)) for name in options.names]

    async def read(self, *, after: str = "", limit: int = 1000) -> list[JournalEvent]:
        """Events after a position, oldest first."""
        if len(self._parts) == 1:
            return [_told(event) for event in await self._parts[0].read(after=after, limit=limit)]
        # A later stream must not answer with what an earlier one had not yet when it was asked.
        end = await self._engine.settled_position()
        merged = [
            event
            for part in self._parts
            for event in await part.read(after=after, limit=limit)
            if int(event.seq) <= end
        ]
        merged.sort(key=lambda event: int(event.seq))
        return [_told(event) for event in merged[:limit]]

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        """Like `read`, but waits for the first event; `after` "$" means from now on."""
        if len(self._parts) == 1:
            events = await self._parts[0].wait(after=after, wait_ms=wait_ms)
            return [_told(event) for event in events]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        if after == "$":
            after = str(await self._engine.settled_position())
        while True:
            events = await self.read(after=after)
            left_ms = round((deadline - loop.time()) * 1000)
            if events or left_ms <= 0:
                return events
            await asyncio.sleep(min(left_ms, _LOOK_MS) / 1000)

    async def last(self) -> str:
        """The position up to which no open transaction can still add an event."""
        return str(await self._engine.settled_position())

    def since(self, ts_ms: int) -> str:
        """The position after which everything that happened since then lies."""
        return self._parts[0].since(ts_ms)

    async def close(self) -> None:
        """Close the connections."""
        for part in self._parts:
            await part.close()


def _told(event: JournalEvent) -> JournalEvent:
    return msgspec.structs.replace(
        event,
        queue=stream_of(event.queue),
        from_state=STATES[event.from_state],
        to_state=STATES[event.to_state],
    )


def tape(store: str, options: PlaneOptions) -> SqlFormat:
    """The same rows for readers in bulk; they are trimmed only behind what was captured."""
    schema = f"{options.schema}." if store.startswith("postgres") else ""
    queues = ", ".join(f"'{queue_of(name)}'" for name in options.names)
    return SqlFormat(
        store=store,
        table=f"{schema}job_journal",
        contract=CONTRACT,
        queue=",".join(options.names),
        fields=("queue", "job_id", "type", "ts_ms", *EVENT_FIELDS),
        where=f"queue IN ({queues})",
        sequence=f"{schema}job_journal_seq_seq" if schema else "job_journal",
        states=tuple(STATES.items()),
        queue_prefix=queue_of(""),
        jobs=f"{schema}{PLANE}",
        queues=tuple(queue_of(name) for name in options.names),
        schema=options.schema,
        by_job="n.listed" if schema else "true",
    )
