"""The ledger on PostgreSQL: one statement an operation, LISTEN for wake-ups."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tenure.core.errors import UsageError
from tenure.ledger.engine import IN_BULK, INBOX, OUTBOX, PACKAGE, Bell, Row
from tenure.ledger.migrating import check_version, mend_sequences
from tenure.ledger.postgres_copy import copied, parts_of, sample_of
from tenure.ledger.postgres_ringing import PostgresRinging
from tenure.ledger.postgres_words import postgres_words
from tenure.store.postgres import CONNECTIONS_MAX, Copied, Postgres
from tenure.store.queries import SEPARATOR, Operation, Operations

HORIZON_PATIENCE_S = 2.0
_SEQUENCE_ENDED = "2200H"
# The steps that put an event into the line, and the column that says that they did: those of jobs
# write their events themselves, and the end of an event lets the next one of its job go.
_TELLING = {
    (INBOX, "claim"): "status_webhook_url",
    (INBOX, "claim+share"): "status_webhook_url",
    **{(box, step): "told" for box in (INBOX, OUTBOX) for step in ("complete", "settle", "decide")},
}


class PostgresEngine:
    """The operations of all boxes over one set of connections."""

    dialect = "postgres"

    def __init__(
        self,
        url: str,
        *,
        schema: str = "tenure",
        synchronous: str = "full",
        pinned: bool = True,
        connections: int = CONNECTIONS_MAX,
    ) -> None:
        if not schema.isidentifier() or schema != schema.lower():
            raise UsageError(f"schema {schema!r}: a plain lower-case name")
        self.database = Postgres(
            url,
            schema=schema,
            durable=synchronous == "full",
            pinned=pinned,
            connections=connections,
        )
        self._operations: dict[str, Operations] = {}
        self._checked = False
        self._begins = asyncio.Lock()
        self._ringing = PostgresRinging(self.database, self.channel)

    @property
    def channel(self) -> str:
        return f"{self.database.schema}_jobs"

    async def run(
        self, table: str, operation: str, batch: Sequence[Sequence[Any]] = (), /, **takes: Any
    ) -> Sequence[Row]:
        if not self._checked:
            await self._check()
        try:
            return await self._run(table, operation, batch, takes)
        except UsageError as error:  # as which the driver counts it; nothing was written
            if getattr(error.reply, "sqlstate", "") != _SEQUENCE_ENDED:
                raise
            await mend_sequences(self.database)
            return await self._run(table, operation, batch, takes)

    async def _run(
        self, table: str, operation: str, batch: Sequence[Sequence[Any]], takes: dict[str, Any]
    ) -> Sequence[Row]:
        found = self.operation(table, operation)
        if operation == "submit" and len(batch) >= IN_BULK and not takes["depth_max"]:
            stored = await self._submit_in_bulk(table, found.batch, batch, takes)
            if stored is not None:
                return stored
        statement, arguments = given(found, batch)
        arguments += [takes[name] for name in found.takes]
        rows = await self.database.fetch(statement, arguments)
        column = _TELLING.get((table, operation))
        if column and any(row[column] for row in rows):
            self._ringing.ring(takes["queue"] + ("/outbox" if table == INBOX else ""))
        return rows

    async def copy(
        self,
        table: str,
        queue: str,
        count: int,
        sample: Mapping[str, Sequence[Any]],
        parts: Callable[[Row], Iterable[Copied]],
    ) -> Row | None:
        """Store so many jobs by COPY, all or none; None when one is known already.

        `parts` makes their rows of the time, turns and positions that are given out, which are
        returned. A `sample` that is known saves the trouble.
        """
        if not self._checked:
            await self._check()
        begin = self.operation(table, "copy_begin")
        takes = {"queue": queue, "channel": self.channel, "count": count}
        opening: list[Any] = [list(sample[name]) for name in begin.batch]
        opening += [takes[name] for name in begin.takes]
        return await copied(self.database, begin.statements[0], opening, parts, self._begins)

    async def _submit_in_bulk(
        self,
        table: str,
        names: Sequence[str],
        batch: Sequence[Sequence[Any]],
        takes: Mapping[str, Any],
    ) -> Sequence[Row] | None:
        """What the submit statement would return; None when it has to decide job by job."""
        given = dict(zip(names, zip(*batch, strict=True), strict=True))
        head = await self.copy(
            *(table, takes["queue"], len(batch), sample_of(given)),
            lambda head: parts_of(table, given, head, takes),
        )
        if head is None:
            return None
        return [{"job_id": job_id, "created_ms": head["now_ms"]} for job_id in given["job_id"]]

    async def _check(self) -> None:
        async with self._begins:  # once; and whoever came first goes on first
            if not self._checked:
                await check_version(self.database)
                await mend_sequences(self.database)
                self._checked = True

    def operation(self, table: str, name: str) -> Operation:
        """An operation on a box, read from its file when first asked for."""
        box = self._operations.get(table)
        if box is None:
            words = postgres_words(table)
            box = self._operations[table] = Operations(PACKAGE, "postgres", words)
        return box[name]

    def bell(self, queue: str) -> Bell:
        return PostgresBell(self.database, self.channel, queue)

    def journal_bell(self, queue: str) -> Bell:
        return self.bell(queue)

    async def settled_position(self) -> int:
        """Behind the oldest open transaction: positions are given out before their commits.

        The position is read first and the transactions after it; once all of those have ended, no
        event at or before the position is still to come.
        """
        position = int((await self.run(OUTBOX, "journal_end"))[0]["seq"])
        until = time.monotonic() + HORIZON_PATIENCE_S
        ended, following = await self._horizon()
        wanted = following
        while ended < wanted:
            if time.monotonic() > until:
                return 0  # somebody keeps a transaction open; the caller asks again later
            await asyncio.sleep(0.002)
            ended, following = await self._horizon()
        return position

    async def _horizon(self) -> tuple[int, int]:
        row = (await self.run(OUTBOX, "horizon"))[0]
        return row["ended"], row["next"]

    async def close(self) -> None:
        await self._ringing.close()
        await self.database.close()


def given(operation: Operation, batch: Sequence[Sequence[Any]]) -> tuple[str, list[Any]]:
    """The statement for a batch and its columns, in the short form where it has one."""
    columns: list[Any] = [list(column) for column in zip(*batch, strict=True)]
    short = _short(operation, columns) if operation.for_alike else None
    if short is None:
        return operation.statements[0], columns
    return operation.for_alike, short


def _short(operation: Operation, columns: Sequence[list[Any]]) -> list[Any] | None:
    """One value for what is alike, one text for many; None where that cannot say it."""
    given: list[Any] = []
    for name, column in zip(operation.batch, columns, strict=True):
        if name in operation.alike:
            if column.count(column[0]) < len(column):
                return None
            given.append(column[0])
        elif isinstance(column[0], str):
            joined = SEPARATOR.join(column)
            if not joined or joined.count(SEPARATOR) != len(column) - 1:
                return None
            given.append(joined)
        else:
            given.append(column)
    return given


class PostgresBell:
    """Listens for the name of one queue."""

    def __init__(self, database: Postgres, channel: str, queue: str) -> None:
        self._database = database
        self._channel = channel
        self._queue = queue
        self._rung = asyncio.Event()

    async def arm(self) -> bool:
        self._rung.clear()
        if await self._database.listen(self._channel, self._heard):
            self._rung.set()  # what was written before we listened
        return False

    async def wait(self, wait_ms: int) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._rung.wait(), wait_ms / 1000)

    async def rest(self, *, more: bool) -> None:
        """Everybody hears a notice: there is none to pass on."""

    async def close(self) -> None:
        self._database.ignore(self._heard)

    def _heard(self, queue: str) -> None:
        if queue == self._queue:
            self._rung.set()
