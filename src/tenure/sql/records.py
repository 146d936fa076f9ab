"""Records beside a queue in SQL: rows of the table `queue_records`."""

from __future__ import annotations

from tenure.plans.flow import StoredFlows, Submit
from tenure.plans.schedule import StoredSchedules
from tenure.sql.engine import OUTBOX, Engine, QueueSettings


class SqlRecords:
    """The records of one queue. `table` is the table of its jobs, `queue` its name there."""

    def __init__(self, engine: Engine, table: str, queue: str) -> None:
        self._engine = engine
        self._table = table
        self._queue = queue

    async def read(self, group: str) -> tuple[int, dict[str, str]]:
        """The database's time, and the records of a group by name."""
        rows = await self._engine.run(self._table, "records_read", queue=self._queue, grp=group)
        found = {row["name"]: row["value"] for row in rows if row["name"] is not None}
        return int(rows[0]["now_ms"]), found

    async def get(self, group: str, name: str) -> str:
        """One record, "" if there is none."""
        rows = await self._engine.run(
            self._table, "records_get", queue=self._queue, grp=group, name=name
        )
        return str(rows[0]["value"]) if rows else ""

    async def swap(
        self, group: str, name: str, before: str, after: str, *, keep_ms: int = 0
    ) -> bool:
        """Replace a record that is `before` by `after`; True if it is `after` now."""
        rows = await self._engine.run(
            *(self._table, "records_swap"),
            queue=self._queue,
            grp=group,
            name=name,
            before=before,
            after=after,
            keep_ms=keep_ms,
        )
        return bool(rows[0]["swapped"])

    async def size(self, group: str) -> int:
        """How many records a group has."""
        rows = await self._engine.run(self._table, "records_size", queue=self._queue, grp=group)
        return int(rows[0]["size"])

    async def chars(self, group: str) -> int:
        """How many characters the records of a group have together."""
        rows = await self._engine.run(self._table, "records_chars", queue=self._queue, grp=group)
        return int(rows[0]["chars"])

    async def expire(self, group: str, keep_ms: int) -> None:
        """Keep a group for so long only."""
        await self._engine.run(
            self._table, "records_expire", queue=self._queue, grp=group, keep_ms=keep_ms
        )


def schedules_of(engine: Engine, settings: QueueSettings) -> StoredSchedules | None:
    """The schedules of a queue; an outbox has none."""
    if settings.table == OUTBOX:
        return None
    return StoredSchedules(SqlRecords(engine, settings.table, settings.queue))


def flows_of(engine: Engine, settings: QueueSettings, submit: Submit) -> StoredFlows | None:
    """The flows of a queue; an outbox has none."""
    if settings.table == OUTBOX:
        return None
    return StoredFlows(SqlRecords(engine, settings.table, settings.queue), submit)
