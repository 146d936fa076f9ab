"""SQL queues on PostgreSQL: one statement per operation, COPY for bulk submits, LISTEN/NOTIFY.

Behind a pooler that shares sessions there are no notices. Readers of a queue then look again after
a part of the time since something was found: often while there is work, seldom when there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import asyncpg

from tenure.core.errors import ServerError, StoreError, UsageError
from tenure.sql.engine import IN_BULK, INBOX, OUTBOX, QueueListener, Row
from tenure.sql.operations import Operation, Operations
from tenure.sql.schema import check_version, repair_sequences
from tenure.store.postgres import CALL_TIMEOUT_S, CONNECTIONS_MAX, Connection, Postgres

_SETTLED_TIMEOUT_S = 2.0
SAMPLE = 16  # how many jobs of a bulk submit are looked up before the COPY
_NOTIFY_PAUSE_S = 0.02
# Callers wait for the ends of their jobs: a notice of one job must not wait long behind another's.
_NEWS_PAUSE_S = 0.004
_NOTIFY = (
    "SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, queue)"
    " FROM unnest($2::text[]) queue"
)
_SEQUENCE_ENDED = "2200H"
# Followers of jobs wait for these, on a channel of their own: they make nothing claimable.
_FOLLOWED = frozenset({"complete", "settle", "decide", "report", "cancel"})
# Without notices, a reader looks again after this part of the time since it found something.
_POLL_PART = 1 / 50
_POLL_MS = (10, 500)
# The operations that find work or news; the last row of those that did names a job.
_FINDS = frozenset({"claim", "claim+share", "plane_claim", "journal"})
# The operations that may make an event claimable, and the column that says whether they did: steps
# of jobs write events, and the end of an event makes the next one of its job ready.
_EVENT_COLUMN = {
    (INBOX, "claim"): "status_webhook_url",
    (INBOX, "claim+share"): "status_webhook_url",
    **{
        (table, operation): "has_event"
        for table in (INBOX, OUTBOX)
        for operation in ("complete", "settle", "decide")
    },
}


class PostgresEngine:
    """The operations on all tables over one set of connections."""

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
        self._order = asyncio.Lock()
        self._found_s: dict[str, float] = {}
        self._notifier = _PostgresNotifier(self.database, self.channel)
        self._news = _PostgresNotifier(self.database, f"{self.channel}_news", _NEWS_PAUSE_S)

    @property
    def channel(self) -> str:
        return f"{self.database.schema}_jobs"

    async def run(
        self, table: str, operation: str, batch: Sequence[Sequence[Any]] = (), /, **params: Any
    ) -> Sequence[Row]:
        if not self._checked:
            await self._check()
        try:
            return await self._run(table, operation, batch, params)
        except UsageError as error:  # the class of this SQLSTATE; nothing was written
            if getattr(error.reply, "sqlstate", "") != _SEQUENCE_ENDED:
                raise
            await repair_sequences(self.database)
            return await self._run(table, operation, batch, params)

    async def _run(
        self, table: str, operation: str, batch: Sequence[Sequence[Any]], params: dict[str, Any]
    ) -> Sequence[Row]:
        found = self.operation(table, operation)
        if operation == "submit" and len(batch) >= IN_BULK and not params["depth_max"]:
            stored = await self._submit_in_bulk(table, found.batch, batch, params)
            if stored is not None:
                return stored
        statement = found.statements[0]
        columns = dict(zip(found.batch, zip(*batch, strict=True), strict=False))
        firsts = {name: columns[name][0] for name in found.constant if batch}
        if firsts and all(columns[name].count(each) == len(batch) for name, each in firsts.items()):
            statement = found.with_constants
            columns |= firsts
        arguments: list[Any] = list(columns.values())
        arguments += [params[name] for name in found.takes]
        rows = await self.database.fetch(statement, arguments)
        if operation in _FINDS and rows and rows[-1]["job_id"] is not None:
            self._found_s[params["queue"]] = time.monotonic()
        if operation in _FOLLOWED:
            self._news.notify(params["queue"])
        column = _EVENT_COLUMN.get((table, operation))
        if column and any(row[column] for row in rows):
            self._notifier.notify(params["queue"] + ("/outbox" if table == INBOX else ""))
        return rows

    async def copy(
        self,
        table: str,
        queue: str,
        count: int,
        sample: Mapping[str, Sequence[Any]],
        write: Callable[[Connection, Row], Awaitable[None]],
    ) -> Row | None:
        """Store new jobs by COPY, all or none; None when one of them is stored already.

        COPY cannot handle conflicts, so a `sample` of the jobs is looked up first. `write` copies
        the rows; it gets the answer of `copy_begin`, which is returned too: the time, and the turns
        and journal positions of the jobs.
        """
        if not self._checked:
            await self._check()
        begin = self.operation(table, "copy_begin")
        params = {"queue": queue, "channel": self.channel, "count": count}
        arguments: list[Any] = [list(sample[name]) for name in begin.batch]
        arguments += [params[name] for name in begin.takes]
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with self._order:  # two calls store their jobs in the order of the calls
                    connection = await stack.enter_async_context(self.database.transaction())
                    head: Row | None = await connection.fetchrow(begin.statements[0], *arguments)
                if head is None or head["known"]:
                    return None
                await write(connection, head)
        except OverflowError:  # a number that no column holds: the submit statement reports it
            return None
        except ServerError as error:
            if isinstance(
                error.reply, asyncpg.UniqueViolationError | asyncpg.DeadlockDetectedError
            ):
                return None
            raise
        return head

    async def _submit_in_bulk(
        self,
        table: str,
        names: Sequence[str],
        batch: Sequence[Sequence[Any]],
        params: Mapping[str, Any],
    ) -> Sequence[Row] | None:
        """What the submit statement would return; None when it has to decide job by job."""
        columns = dict(zip(names, zip(*batch, strict=True), strict=True))

        async def write(connection: Connection, head: Row) -> None:
            for rows in rows_of_submit(table, columns, head, params):
                await connection.copy_records_to_table(
                    rows.table, columns=rows.columns, records=rows.records, timeout=CALL_TIMEOUT_S
                )

        every = max(1, len(batch) // SAMPLE)
        sample = {name: values[::every] for name, values in columns.items()}
        head = await self.copy(table, params["queue"], len(batch), sample, write)
        if head is None:
            return None
        return [{"job_id": job_id, "created_ms": head["now_ms"]} for job_id in columns["job_id"]]

    async def _check(self) -> None:
        async with self._order:  # check once; waiting calls continue in their order
            if not self._checked:
                await check_version(self.database)
                await repair_sequences(self.database)
                self._checked = True

    def operation(self, table: str, name: str) -> Operation:
        """An operation on a table."""
        operations = self._operations.get(table)
        if operations is None:
            operations = self._operations[table] = Operations("postgres", table)
        return operations[name]

    def listener(self, queue: str) -> QueueListener:
        return _PostgresListener(self, queue, self.channel)

    def journal_listener(self, queue: str) -> QueueListener:
        return _PostgresListener(self, queue, self.channel, self._news.channel)

    def poll_ms(self, queue: str) -> float:
        """When to look again for work or news of a queue of which there are no notices."""
        idle_ms = (time.monotonic() - self._found_s.setdefault(queue, time.monotonic())) * 1000
        lowest, highest = _POLL_MS
        # At random times, so that many readers spread.
        return max(lowest, min(highest, idle_ms * _POLL_PART)) * random.uniform(0.75, 1.25)

    async def settled_position(self) -> int:
        """The last position before all open transactions: positions are allocated before a commit.

        The position is read first and the open transactions after it. Once those have ended, no
        event at or before the position is still to come.
        """
        position = int((await self.run(OUTBOX, "journal_end"))[0]["seq"])
        until = time.monotonic() + _SETTLED_TIMEOUT_S
        ended, following = await self._horizon()
        target = following
        while ended < target:
            if time.monotonic() > until:
                return 0  # a transaction stays open; the caller tries again later
            await asyncio.sleep(0.002)
            ended, following = await self._horizon()
        return position

    async def _horizon(self) -> tuple[int, int]:
        row = (await self.run(OUTBOX, "horizon"))[0]
        return row["ended"], row["next"]

    async def close(self) -> None:
        await self._notifier.close()
        await self._news.close()
        await self.database.close()


_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("gid", "requester_id", "trace"), ""),
    **dict.fromkeys(("priority", "due_ms", "expires_ms", "credential_version"), 0),
    **dict.fromkeys(("status_webhook_url", "refresh_url", "storage_creds_encrypted")),
    **dict.fromkeys(("storage_creds_dek_wrapped", "storage_creds_kek_id")),
    "storage_creds_encryption_version": None,
    "ready": True,
}
_NOT_JOB_COLUMNS = ("delay_ms", "ttl_ms", "idempotency_key")
_EVENT_COLUMNS = ("job_id", "task", "gid", "priority", "due_ms", "max_attempts", "payload_h")
_NO_DEFAULT = object()

_Columns = Mapping[str, Sequence[Any]]


class CopyRows(NamedTuple):
    """Rows for COPY into one table."""

    table: str
    columns: Sequence[str]
    records: Iterable[Sequence[Any]]


def rows_of_submit(
    table: str, given: _Columns, head: Row, params: Mapping[str, Any]
) -> list[CopyRows]:
    """Keys, jobs and first events of a submit, as the submit statement writes them."""
    count, now_ms, queue = len(given["job_id"]), head["now_ms"], params["queue"]
    jobs: dict[str, Sequence[Any]] = {
        name: given[name] for name in given if name not in _NOT_JOB_COLUMNS
    }
    jobs["due_ms"] = _later(given["delay_ms"], now_ms)
    jobs["expires_ms"] = _later(given["ttl_ms"], now_ms)
    jobs["ready"] = [not delay_ms for delay_ms in given["delay_ms"]]
    events: _Columns = {name: jobs[name] for name in _EVENT_COLUMNS}
    job = {"queue": queue, "created_ms": now_ms, "updated_ms": now_ms}
    event = {"queue": queue, "ver": 1, "type": "submit", "ts_ms": now_ms, "to_state": "queued"}
    return [
        *_keys(table, given, now_ms, params),
        _copy_rows(table, count, {"seq": head["turns"], **jobs}, job, _DEFAULTS),
        _copy_rows(
            *("job_journal", count, {"seq": head["positions"], **events}),
            {**event, "listed": False},
            _DEFAULTS,
        ),
    ]


def _keys(table: str, given: _Columns, now_ms: int, params: Mapping[str, Any]) -> list[CopyRows]:
    names = ("requester_id", "idempotency_key", "request_hash", "job_id")
    rows = [row for row in zip(*map(given.__getitem__, names), strict=True) if row[1]]
    if not rows:
        return []
    rows.sort()  # so that two batches do not deadlock
    same = {
        "queue": params["queue"],
        "created_ms": now_ms,
        "expires_ms": now_ms + params["key_ttl_ms"],
    }
    columns: dict[str, Sequence[Any]] = dict(zip(names, zip(*rows, strict=True), strict=True))
    if table == INBOX:  # the fragment `response`
        columns["response"] = [
            f'{{"job_id":"{job_id}","status":"queued"}}' for job_id in columns["job_id"]
        ]
    return [_copy_rows("idempotency_keys", len(rows), columns, same, {})]


def _copy_rows(
    table: str,
    count: int,
    columns: _Columns,
    same: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> CopyRows:
    """Rows of columns, and of values that all rows share. All-default columns are omitted."""
    needed = {
        name: values
        for name, values in columns.items()
        if values[0] != defaults.get(name, _NO_DEFAULT) or values.count(values[0]) < count
    }
    shared = [repeat(value, count) for value in same.values()]
    return CopyRows(table, (*needed, *same), zip(*needed.values(), *shared, strict=True))


def _later(spans_ms: Sequence[int], now_ms: int) -> Sequence[int]:
    return [now_ms + span_ms if span_ms else 0 for span_ms in spans_ms]


class _PostgresNotifier:
    """Notifies claimers of new events, in a transaction of its own.

    PostgreSQL commits one notifying transaction at a time. With a notice in every step, steps would
    wait for each other's flush. A notice only saves a poll, so it is sent separately, for many
    steps at once, and does not wait for a flush itself.
    """

    def __init__(self, database: Postgres, channel: str, pause_s: float = _NOTIFY_PAUSE_S) -> None:
        self._database = database
        self.channel = channel
        self._pause_s = pause_s
        self._due: set[str] = set()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def notify(self, queue: str) -> None:
        """Notify the claimers of this queue: at once, or together with others after a pause."""
        self._due.add(queue)
        if self._task is None:
            self._task = asyncio.create_task(self._send())

    async def close(self) -> None:
        """Send what is due and stop."""
        self._closing.set()
        if self._task is not None:
            await self._task

    async def _send(self) -> None:
        try:
            while self._due:
                queues, self._due = sorted(self._due), set()
                with contextlib.suppress(StoreError):  # then the claimers find it by polling
                    await self._database.fetch(_NOTIFY, [self.channel, queues])
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), self._pause_s)
        finally:
            self._task = None


class _PostgresListener:
    """Listens for notices of one queue, on one channel or on several."""

    def __init__(self, engine: PostgresEngine, queue: str, *channels: str) -> None:
        self._engine = engine
        self._queue = queue
        self._channels = channels
        self._notified = asyncio.Event()
        self._polls = False

    async def arm(self) -> bool:
        self._notified.clear()
        for channel in self._channels:
            missed = await self._engine.database.listen(channel, self._on_notice)
            self._polls = missed is None
            if missed:
                self._notified.set()  # look for what was written before we listened
        return False

    async def wait(self, wait_ms: int) -> None:
        if self._polls:
            wait_ms = min(wait_ms, round(self._engine.poll_ms(self._queue)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._notified.wait(), wait_ms / 1000)

    async def disarm(self, *, more: bool) -> None:
        """Every listener gets a notice: there is none to pass on."""

    async def close(self) -> None:
        self._engine.database.ignore(self._on_notice)

    def _on_notice(self, queue: str) -> None:
        if queue == self._queue:
            self._notified.set()
