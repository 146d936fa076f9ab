"""Columns of jobs straight into a table of the ledger: the same rows as a submit writes, by COPY.

What is not simple enough for that (a job named twice, a payload that is no JSON, options that
differ from row to row) is left to the submit, which answers job by job.

Ids make it safe to send a part again: what is stored already is found by its id, and counts as
replayed when the request is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import asyncpg
import pyarrow as pa

from leasehold.core.errors import ServerError
from leasehold.core.opening import open_part
from leasehold.ledger.migrating import check_version
from leasehold.ledger.postgres_engine import PostgresEngine
from leasehold.ledger.settings import BoxSettings
from leasehold.pipeline.source.columns import Part, Stored, part_of, tables_of

if TYPE_CHECKING:
    from asyncpg import Connection, Record

_SAMPLE = 16
_KNOWN = (asyncpg.UniqueViolationError, asyncpg.DeadlockDetectedError)


class BoxColumns:
    """Puts columns of jobs into one box on PostgreSQL, for one event loop."""

    def __init__(self, engine: PostgresEngine, settings: BoxSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._begins = asyncio.Lock()
        self._is_checked = False

    async def store(self, batch: pa.RecordBatch) -> Stored:
        """Store what can be stored in one piece."""
        part = part_of(batch)
        if part is None:
            return Stored(rest=batch)
        async with self._begins:
            if not self._is_checked:
                await check_version(self._engine.database)
                self._is_checked = True
        if await self._copied(part, every=max(1, len(part) // _SAMPLE)):
            return Stored(created=len(part))
        return await self._store_unknown(part, batch)

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.close()

    async def _store_unknown(self, part: Part, batch: pa.RecordBatch) -> Stored:
        """When some are known: those that are the same are done, and all others are new."""
        asked = [(job_id, "", "") for job_id in part.job_id.to_pylist()]
        settings = self._settings
        found = await self._engine.run(settings.table, "lookup", asked, queue=settings.queue)
        hashes = part.request_hash.to_pylist()
        known = {row["n"] - 1 for row in found}
        same = {at for row in found if hashes[at := row["n"] - 1] == row["request_hash"].encode()}
        fresh = [at not in known for at in range(len(part))]
        if len(known) == len(same) and (not any(fresh) or await self._copied(part.where(fresh))):
            return Stored(created=len(part) - len(same), replayed=len(same))
        rest = [at not in same for at in range(len(part))]
        return Stored(replayed=len(same), rest=batch.filter(pa.array(rest)))

    async def _copied(self, part: Part, *, every: int = 0) -> bool:
        """All of it, or nothing if one is known already; a sample of them is looked at before."""
        sample = part.job_id[::every].to_pylist() if every else []
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with self._begins:  # two that are under way have their turns in that order
                    database = self._engine.database
                    connection = await stack.enter_async_context(database.transaction())
                    head = await self._begin(connection, sample, len(part))
                if head["known"]:
                    return False
                for rows in tables_of(part, head, self._settings):
                    await database.copy(connection, rows)
        except ServerError as error:
            if isinstance(error.reply, _KNOWN):
                return False
            raise
        return True

    async def _begin(
        self, connection: Connection[Record], sample: list[str], count: int
    ) -> Mapping[str, Any]:
        begin = self._engine.operation(self._settings.table, "copy_begin")
        none = [""] * len(sample)
        given = {"job_id": sample, "requester_id": none, "idempotency_key": none}
        takes = {"queue": self._settings.queue, "channel": self._engine.channel, "count": count}
        arguments = [*(given[name] for name in begin.batch), *(takes[name] for name in begin.takes)]
        head: Mapping[str, Any] | None = await connection.fetchrow(begin.statements[0], *arguments)
        if head is None:
            raise ServerError("PostgreSQL gave no time to a submit")
        return head


def open_columns(url: str) -> BoxColumns | None:
    """The box behind a URL of PostgreSQL; None of one whose jobs must be counted first."""
    engine, settings = open_part(url, "box")
    return None if settings.depth_max else BoxColumns(engine, settings)
