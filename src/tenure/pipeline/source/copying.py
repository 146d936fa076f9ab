"""Writes columns of jobs into the ledger by COPY: the same rows as a submit writes.

Jobs that need more checks (an id used twice, a payload that is not JSON, options that differ from
row to row) are left to the submit, which answers job by job.

Ids make it safe to send jobs again: a job that is stored already is found by its id, and counts as
replayed if the request is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tenure.core.registry import open_part
from tenure.pipeline.source.columns import Part, Stored, part_of, tables_of
from tenure.sql.engine import QueueSettings, Row
from tenure.sql.postgres_engine import SAMPLE, PostgresEngine
from tenure.store.postgres import Connection


class BoxColumns:
    """Puts columns of jobs into one box on PostgreSQL, for one event loop."""

    def __init__(self, engine: PostgresEngine, settings: QueueSettings) -> None:
        self._engine = engine
        self._settings = settings

    async def store(self, batch: pa.RecordBatch) -> Stored:
        """Store the jobs that COPY can store."""
        part = part_of(batch)
        if part is None:
            return Stored(rest=batch)
        ids = part.job_id[:: max(1, len(part) // SAMPLE)].to_pylist()
        if await self._copied(part, ids):
            return Stored(created=len(part))
        return await self._store_unknown(part, batch)

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.close()

    async def _store_unknown(self, part: Part, batch: pa.RecordBatch) -> Stored:
        """If some ids exist: jobs with the same request are done, all other jobs are new."""
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

    async def _copied(self, part: Part, sample: Sequence[str] = ()) -> bool:
        """Store all jobs, or none if one exists already; a sample of ids is checked first."""
        none = [""] * len(sample)
        database = self._engine.database

        async def write(connection: Connection, head: Row) -> None:
            for rows in tables_of(part, head, self._settings):
                await database.copy(connection, rows)

        head = await self._engine.copy(
            *(self._settings.table, self._settings.queue, len(part)),
            {"job_id": sample, "requester_id": none, "idempotency_key": none},
            write,
        )
        return head is not None


def open_columns(url: str) -> BoxColumns | None:
    """The box behind a PostgreSQL URL; None if it limits its depth, because COPY does not count."""
    engine, settings = open_part(url, "box")
    return None if settings.depth_max else BoxColumns(engine, settings)
