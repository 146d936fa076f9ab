"""SQL queues on SQLite: an operation is a few statements in one transaction."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tenure.core.errors import StoreUnreachable
from tenure.sql.engine import OUTBOX, QueueListener, Row, UnreadableRow
from tenure.sql.operations import Operation, Operations
from tenure.sql.schema import prepare_file, repair_counters
from tenure.store.file_notifier import POLL_EVERY_MS, FileWatcher, Listener, notify
from tenure.store.sqlite import (
    NEXT_SUFFIX,
    PIPES_SUFFIX,
    SqliteFile,
    close_file,
    file_of,
    in_hex,
    now_ms,
    open_file,
)

# Operations that change nothing.
_READS = frozenset(
    {"get", "find", "pruned", "attempts", "counts", "summary", "events", "journal", "journal_end"}
    | {"horizon", "settled", "recover", "lookup", "peek", "creds_read", "failed_jobs"}
    | {"upkeep_needed"}
    | {"creds_page", "creds_counts", "secrets_live", "secrets_plain", "key_list", "key_find"}
    | {"records_read", "records_get", "records_size"}
    | {"plane_current", "plane_leases", "audit_list", "audit_read", "audit_head", "reader_list"}
)
_CLAIMS = frozenset({"claim", "claim+share", "plane_claim"})
_LISTS = frozenset({"token_hs"})
_KEEP_NOTICE_S = 0.01
"""How long a claimer keeps a notice for its next claim."""


class SqliteEngine:
    """The operations on all tables of one file."""

    dialect = "sqlite"
    channel = ""

    def __init__(self, url: str, *, synchronous: str = "full") -> None:
        self.path = file_of(url)
        self._client = url.partition(":")[0]
        self._synchronous = synchronous
        self._file: SqliteFile | None = None
        self._operations: dict[str, Operations] = {}
        self._busy: set[str] = set()

    async def run(
        self, table: str, operation: str, batch: Sequence[Sequence[Any]] = (), /, **params: Any
    ) -> Sequence[Row]:
        operations = self._of_table(table)
        if operation in _CLAIMS:
            return await self._claim(operations, operation, batch, params)
        return await self._run(operations[operation], batch, params)

    async def _claim(
        self,
        operations: Operations,
        operation: str,
        batch: Sequence[Sequence[Any]],
        params: dict[str, Any],
    ) -> Sequence[Row]:
        """Check first whether the queue has work, which needs no write lock.

        The check is skipped after a claim that got all it wanted, unless it wanted one job only:
        that is what idle workers claim.
        """
        queue = params["queue"]
        if queue not in self._busy:
            found = await self._run(operations["peek"], (), {"queue": queue})
            if not found[0]["work"]:
                return found
        self._busy.discard(queue)
        rows = await self._run(operations[operation], batch, params)
        limit = params["count"] if "count" in params else sum(claim[-1] for claim in batch)
        if len(rows) >= limit > 1 and rows[0]["job_id"] is not None:
            self._busy.add(queue)
        return rows

    async def _run(
        self, operation: Operation, batch: Sequence[Sequence[Any]], params: dict[str, Any]
    ) -> Sequence[Row]:
        parameters = {
            name: _json(value) if name in _LISTS else value for name, value in params.items()
        }
        if operation.batch:
            parameters["batch"] = _json(in_hex(batch) if self._client == "libsql" else batch)

        def step(connection: sqlite3.Connection) -> list[Row]:
            parameters["now_ms"] = now_ms(connection)
            rows: list[Row] = []
            for statement in operation.statements:
                rows = _fetch(connection, statement, parameters)
            return rows

        file = self._opened()
        if operation.name in _READS:
            await self._prepared(file)
            return await file.read(step)  # type: ignore[no-any-return]
        try:
            return await file.write(step)  # type: ignore[no-any-return]
        except StoreUnreachable as error:  # nothing was written
            if "disk is full" not in str(error):
                raise
            await file.write(repair_counters)
            return await file.write(step)  # type: ignore[no-any-return]

    async def _prepared(self, file: SqliteFile) -> None:
        """Let the writer create the tables; a reader cannot."""
        if not file.prepared:
            await file.write(lambda connection: None)

    def _of_table(self, table: str) -> Operations:
        operations = self._operations.get(table)
        if operations is None:
            operations = self._operations[table] = Operations("sqlite", table)
        return operations

    def _opened(self) -> SqliteFile:
        if self._file is None:
            self._file = open_file(
                self.path, self._synchronous, prepare_file, self._client, _queues_with_work
            )
        return self._file

    def listener(self, queue: str) -> QueueListener:
        return SqliteListener(self.path, queue)

    def journal_listener(self, queue: str) -> QueueListener:
        return _SqliteJournalListener(self.path)

    async def settled_position(self) -> int:
        """There is one writer, so what is committed is complete."""
        return int((await self.run(OUTBOX, "journal_end"))[0]["seq"])

    async def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            await asyncio.to_thread(close_file, file)


class SqliteListener:
    """Wakes one of the claimers of a queue, after one of our processes wrote work for it.

    A claimer that got all it wanted claims again at once while it has free slots. So it keeps a
    notice for a moment before it passes it on: if every claim woke others, all processes would
    share the work in tiny batches. Polling finds what other programs write, and the notice of a
    process that died.
    """

    def __init__(self, path: Path, queue: str) -> None:
        self._folder = path.with_name(path.name + PIPES_SUFFIX)
        self._queue = queue
        self._notified = asyncio.Event()
        self._listener: Listener | None = None
        self._listens = False
        self._pass_on_timer: asyncio.TimerHandle | None = None

    async def arm(self) -> bool:
        if self._pass_on_timer is not None:
            self._pass_on_timer.cancel()
        if self._listener is None:
            self._listener = Listener(self._folder, self._queue, self._notified.set)
        self._listens = self._listener.open()
        notified = self._notified.is_set()
        self._notified.clear()
        return notified

    async def wait(self, wait_ms: int) -> None:
        if not self._listens:
            wait_ms = min(wait_ms, POLL_EVERY_MS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._notified.wait(), wait_ms / 1000)
        self._notified.clear()

    async def disarm(self, *, more: bool) -> None:
        if more:
            self._notified.set()
        self._pass_on_timer = asyncio.get_running_loop().call_later(_KEEP_NOTICE_S, self._pass_on)

    def _pass_on(self) -> None:
        unused = self._listener is not None and self._listener.close()
        if unused or self._notified.is_set():
            self._notified.clear()
            notify(self._folder, self._queue)

    async def close(self) -> None:
        if self._pass_on_timer is not None:
            self._pass_on_timer.cancel()
        self._pass_on()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.remove()


class _SqliteJournalListener:
    """Wakes every reader when any process has written to the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._notified = asyncio.Event()
        self._watch: FileWatcher | None = None

    async def arm(self) -> bool:
        if self._watch is None:
            names = (self._path.name + "-wal", self._path.name + NEXT_SUFFIX)
            self._watch = FileWatcher(self._path.parent, names, self._notified.set)
        self._notified.clear()
        return False

    async def wait(self, wait_ms: int) -> None:
        if self._watch is None or not self._watch.is_active:
            wait_ms = min(wait_ms, POLL_EVERY_MS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._notified.wait(), wait_ms / 1000)

    async def disarm(self, *, more: bool) -> None:
        """Every listener gets a notice: there is none to pass on."""

    async def close(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()


def _queues_with_work(connection: sqlite3.Connection) -> list[str]:
    """The queues for which this transaction made work; clears the list."""
    queues = [row[0] for row in connection.execute("SELECT queue FROM temp.queues_with_work")]
    if queues:
        connection.execute("DELETE FROM temp.queues_with_work")
    return queues


def _fetch(connection: sqlite3.Connection, statement: str, parameters: dict[str, Any]) -> list[Row]:
    """Run a statement; if a row has text that is not UTF-8, all rows are `UnreadableRow`."""
    try:
        return connection.execute(statement, parameters).fetchall()
    except sqlite3.OperationalError as error:
        if "Could not decode to UTF-8" not in str(error):
            raise
    connection.text_factory = bytes
    try:
        cursor = connection.execute(statement, parameters)
        names = [column[0] for column in cursor.description]
        return [UnreadableRow(names, tuple(row)) for row in cursor.fetchall()]
    finally:
        connection.text_factory = str


def _json(value: Any) -> str:
    """A list as one text; bytes in it become base64."""
    return msgspec.json.encode(value).decode()
