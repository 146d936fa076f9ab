"""The SQL queues on PostgreSQL: one statement per operation, COPY for large submits, LISTEN."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import asyncpg

from tenure.core.errors import ServerError, StoreError, UsageError
from tenure.sql.engine import (
    IN_BULK,
    INBOX,
    OUTBOX,
    PACKAGE,
    RESPONSE,
    RUNNING,
    QueueListener,
    Row,
    part,
    words_of,
)
from tenure.sql.operations import SEPARATOR, Operation, Operations
from tenure.sql.schema import check_version, mend_sequences
from tenure.store.postgres import CONNECTIONS_MAX, Copied, Postgres

NOW = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"

# An event that ended lets the next one of its job into the line in the same step. One that is not
# next by its number, because an event between them was removed, is found by `unblock`.
_RELEASE_NEXT = """,
released AS (
  UPDATE {table} e SET ready = true FROM ended d
  WHERE d.status IN ('succeeded', 'dead_letter') AND event_number(d.job_id, d.gid) > 0
    AND e.job_id = d.gid || '.' || (event_number(d.job_id, d.gid) + 1)
    AND (e.status = 'queued') IS TRUE AND e.due_ms = 0 AND NOT e.ready AND {in_turn}
  RETURNING e.job_id
)"""
_SPAN = 2_000
_SILENT = dict.fromkeys(
    ("count_event", "event_columns", "tell_taken", "tell_ended", "tells", "tells_any"), ""
)


# A requester has no more jobs at once than its quota, nor all the slots of a worker.
_WITHIN_SHARE = f"""(j.requester_id = '' OR j.requester_id NOT IN (
    SELECT r.requester_id FROM {INBOX} r LEFT JOIN api_keys k ON k.key_id = r.requester_id
    WHERE r.queue = :queue AND r.status IN {RUNNING} AND r.lease_expires_at > 0
    GROUP BY r.requester_id, k.quota
    HAVING count(*) FILTER (WHERE r.worker_id = :worker_id) >= :share OR count(*) >= coalesce(
      nullif(coalesce((k.quota::json ->> 'transcodes')::bigint, :requester_max), 0), 1e9)))"""  # nosec B608 # names of ours


def postgres_words(table: str) -> dict[str, str]:
    """The fragments that make the statements of one box."""
    words = words_of(table, NOW) | {"told_by": "NULL", "span": str(2**62)}
    if table == OUTBOX:  # an event waits for the earlier events of its job, whatever its flag says
        release = _RELEASE_NEXT.format(table=table, in_turn=_in_turn("d.gid", "d.job_id"))
        words |= {"in_turn": _in_turn("j.gid", "j.job_id"), "after_settle": release}
        # Its history lies among the steps of its jobs, of which not all told of an event.
        words |= {"told_by": "left(:queue, -7)", "span": str(_SPAN)}
    if table == INBOX:
        return words | _telling() | {"share": _WITHIN_SHARE}
    tells = ", EXISTS (SELECT FROM released) AS told" if table == OUTBOX else ""
    return words | {**_SILENT, "told": "0", "tells": tells, "tells_any": tells}


def _in_turn(gid: str, event_id: str) -> str:
    return _earlier_ended(gid, f"event_number({event_id}, {gid})")


def _earlier_ended(gid: str, number: str) -> str:
    """That all events of a job before this number have ended."""
    text = part("postgres", "earlier").replace("{gid}", gid).replace("{number}", number)
    return f"({text})"


def _telling() -> dict[str, str]:
    """Of the inbox: who counts the event of a step writes it too, in the same statement."""
    first = _earlier_ended("m.job_id", "m.event_count")
    text = part("postgres", "tell").replace("{first_of_job}", first)
    return {
        "count_event": ",\n    event_count = j.event_count"
        " + (j.status_webhook_url IS NOT NULL)::integer",
        "event_columns": ", j.event_count, j.result, j.error, j.progress",
        "told": "CASE WHEN status_webhook_url IS NULL THEN 0 ELSE event_count END",
        "tell_taken": text.replace("{moved}", "taken"),
        "tell_ended": text.replace("{moved}", "ended"),
        "tells": ", status_webhook_url IS NOT NULL AS told",
        "tells_any": ", count(status_webhook_url) > 0 AS told",
    }


_PAUSE_S = 0.02
_NOTICE = (
    "SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, queue)"
    " FROM unnest($2::text[]) queue"
)


class PostgresNotifier:
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


_HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TAIL = b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"
_COUNT = struct.Struct(">h")
_LENGTH = struct.Struct(">i")
_SHORT = struct.Struct(">ii")
_LONG = struct.Struct(">iq")
_SHORT_COLUMNS = frozenset(
    ("priority", "max_attempts", "credential_version", "storage_creds_encryption_version")
)


class PackedRows:
    """Packs the rows of one submit, table by table.

    What it takes for a column's type follows from the values: text, bytes, boolean, and numbers of
    64 bits but for the columns that are known as short. Raises `struct.error` for what is too big.
    """

    def __init__(self) -> None:
        self._packed: dict[int, tuple[Sequence[Any], list[bytes]]] = {}

    def rows(
        self, count: int, columns: Mapping[str, Sequence[Any]], same: Mapping[str, Any]
    ) -> bytes:
        """`count` rows of these columns, and after them of values that are the same in all."""
        first = _COUNT.pack(len(columns) + len(same))
        last = b"".join(_value(name, value) for name, value in same.items())
        fields = [self._column(name, values) for name, values in columns.items()]
        rows = zip(repeat(first, count), *fields, repeat(last, count), strict=True)
        return b"".join((_HEAD, *map(b"".join, rows), _TAIL))

    def _column(self, name: str, values: Sequence[Any]) -> list[bytes]:
        known = self._packed.get(id(values))
        if known is None:  # kept with its values, so that no other column gets their id
            known = self._packed[id(values)] = (values, _packed(name, values))
        return known[1]


def _packed(name: str, values: Sequence[Any]) -> list[bytes]:
    kinds = set(map(type, values))
    if kinds == {str}:
        texts = [text.encode() for text in values]
        lengths = set(map(len, texts))
        if len(lengths) == 1:
            length = _LENGTH.pack(lengths.pop())
            return [length + text for text in texts]
        return [_LENGTH.pack(len(text)) + text for text in texts]
    if kinds == {int} and name not in _SHORT_COLUMNS:
        return [_LONG.pack(8, number) for number in values]
    return [_value(name, value) for value in values]


def _value(name: str, value: Any) -> bytes:
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return b"\0\0\0\1\1" if value else b"\0\0\0\1\0"
    if isinstance(value, int):
        return _SHORT.pack(4, value) if name in _SHORT_COLUMNS else _LONG.pack(8, value)
    data = value.encode() if isinstance(value, str) else bytes(value)
    return _LENGTH.pack(len(data)) + data


SAMPLE = 16
_KNOWN = (asyncpg.UniqueViolationError, asyncpg.DeadlockDetectedError)
_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("gid", "requester_id", "trace"), ""),
    **dict.fromkeys(("priority", "due_ms", "expires_ms", "credential_version"), 0),
    **dict.fromkeys(("status_webhook_url", "refresh_url", "storage_creds_encrypted")),
    **dict.fromkeys(("storage_creds_dek_wrapped", "storage_creds_kek_id")),
    "storage_creds_encryption_version": None,
    "ready": True,
}
_NONE = object()
_NOT_OF_JOBS = ("delay_ms", "ttl_ms", "idempotency_key")
_OF_NOTES = ("job_id", "task", "gid", "priority", "due_ms", "max_attempts", "payload_h")

Columns = Mapping[str, Sequence[Any]]


async def copied(
    database: Postgres,
    begin: str,
    opening: Sequence[Any],
    parts: Callable[[Row], Iterable[Copied]],
    begins: asyncio.Lock,
) -> Row | None:
    """Copy in what `parts` makes of the answer to `begin`, all of it or nothing; that answer.

    None when some of it is known already. Two at once begin one after the other, and their jobs are
    in line in that order.
    """
    try:
        async with contextlib.AsyncExitStack() as stack:
            async with begins:
                connection = await stack.enter_async_context(database.transaction())
                head: Row | None = await connection.fetchrow(begin, *opening)
            if head is None or head["known"]:
                return None
            for part in parts(head):
                await database.copy(connection, part)
    except struct.error:  # a number that no column holds: said by the submit statement
        return None
    except ServerError as error:
        if isinstance(error.reply, _KNOWN):
            return None
        raise
    return head


def sample_of(given: Columns) -> Columns:
    """A few rows, to see by them whether what is given is known already."""
    every = max(1, len(given["job_id"]) // SAMPLE)
    return {name: values[::every] for name, values in given.items()}


def parts_of(table: str, given: Columns, head: Row, takes: Mapping[str, Any]) -> list[Copied]:
    """Keys, jobs and first events, in the order in which the submit statement writes them."""
    count, now_ms = len(given["job_id"]), head["now_ms"]
    jobs: dict[str, Sequence[Any]] = {
        name: given[name] for name in given if name not in _NOT_OF_JOBS
    }
    jobs["due_ms"] = _later(given["delay_ms"], now_ms)
    jobs["expires_ms"] = _later(given["ttl_ms"], now_ms)
    jobs["ready"] = [not delay_ms for delay_ms in given["delay_ms"]]
    notes: Columns = {name: jobs[name] for name in _OF_NOTES}
    same = {"queue": takes["queue"], "created_ms": now_ms, "updated_ms": now_ms}
    packing = PackedRows()
    noted = {"queue": takes["queue"], "ver": 1, "type": "submit", "ts_ms": now_ms}
    return [
        *_keys(packing, table, given, now_ms, takes),
        _copied(packing, table, count, {"seq": head["turns"], **jobs}, same),
        _copied(
            packing,
            "job_journal",
            count,
            {"seq": head["positions"], **notes},
            {**noted, "to_state": "queued", "listed": False},
        ),
    ]


def _keys(
    packing: PackedRows, table: str, given: Columns, now_ms: int, takes: Mapping[str, Any]
) -> list[Copied]:
    names = ("requester_id", "idempotency_key", "request_hash", "job_id")
    rows = [row for row in zip(*map(given.__getitem__, names), strict=True) if row[1]]
    if not rows:
        return []
    rows.sort()  # two batches never wait for each other's keys
    until_ms = now_ms + takes["key_ttl_ms"]
    same = {"queue": takes["queue"], "created_ms": now_ms, "expires_ms": until_ms}
    columns: dict[str, Sequence[Any]] = dict(zip(names, zip(*rows, strict=True), strict=True))
    if table == INBOX:
        columns["response"] = [job_id.join(RESPONSE) for job_id in columns["job_id"]]
    return [_copied(packing, "idempotency_keys", len(rows), columns, same, every=True)]


def _copied(
    packing: PackedRows,
    table: str,
    count: int,
    columns: Columns,
    same: Mapping[str, Any],
    *,
    every: bool = False,
) -> Copied:
    """Rows of columns, and of values that are the same in all of them."""
    told: dict[str, Sequence[Any]] = {}
    shared = dict(same)
    for name, values in columns.items():
        if values.count(values[0]) == count:
            if every or values[0] != _DEFAULTS.get(name, _NONE):
                shared[name] = values[0]
        else:
            told[name] = values
    return Copied(table, (*told, *shared), packing.rows(count, told, shared))


def _later(spans_ms: Sequence[int], now_ms: int) -> Sequence[int]:
    return [now_ms + span_ms if span_ms else 0 for span_ms in spans_ms]


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
        self._ringing = PostgresNotifier(self.database, self.channel)

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

    def bell(self, queue: str) -> QueueListener:
        return PostgresListener(self.database, self.channel, queue)

    def journal_bell(self, queue: str) -> QueueListener:
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


class PostgresListener:
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
