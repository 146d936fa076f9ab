"""The ledger on SQLite: an operation is a few statements in one transaction."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tenure.core.errors import StoreUnreachable
from tenure.ledger.engine import OUTBOX, PACKAGE, Bell, Row
from tenure.ledger.sqlite_migrations import mend_places, prepare, queues_with_work
from tenure.ledger.sqlite_words import sqlite_words
from tenure.ledger.unreadable import UnreadableRow
from tenure.store.file_notifier import POLL_EVERY_MS, FileWatcher, Listener, notify
from tenure.store.queries import Operation, Operations
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
READS = frozenset(
    {"get", "find", "pruned", "attempts", "counts", "summary", "events", "journal", "journal_end"}
    | {"horizon", "settled", "recover", "lookup", "peek", "creds_read", "resting", "chores"}
    | {"creds_page", "creds_counts", "secrets_live", "secrets_plain", "key_list", "key_find"}
    | {"plane_current", "audit_list", "audit_read", "audit_head", "reader_list"}
)
CLAIMS = frozenset({"claim", "claim+share", "plane_claim"})
_LISTS = frozenset({"token_hs"})
_KEEP_S = 0.01
"""How long a claimer that rests keeps a ring for its next claim."""


class SqliteEngine:
    """The operations of all boxes in one file."""

    dialect = "sqlite"
    channel = ""

    def __init__(self, url: str, *, synchronous: str = "full") -> None:
        self.path = file_of(url)
        self._client = url.partition(":")[0]
        self._synchronous = synchronous
        self._file: SqliteFile | None = None
        self._operations: dict[str, Operations] = {}
        self._plenty: set[str] = set()

    async def run(
        self, table: str, operation: str, batch: Sequence[Sequence[Any]] = (), /, **takes: Any
    ) -> Sequence[Row]:
        box = self._box(table)
        if operation in CLAIMS:
            return await self._claim(box, operation, batch, takes)
        return await self._run(box[operation], batch, takes)

    async def _claim(
        self, box: Operations, operation: str, batch: Sequence[Sequence[Any]], takes: dict[str, Any]
    ) -> Sequence[Row]:
        """An empty line is seen without the right to write; one that just gave all is not empty.

        A claim for one, which is what an idle worker makes, tells nothing of the line.
        """
        queue = takes["queue"]
        if queue not in self._plenty:
            head = await self._run(box["peek"], (), {"queue": queue})
            if not head[0]["work"]:
                return head
        self._plenty.discard(queue)
        rows = await self._run(box[operation], batch, takes)
        wanted = takes["count"] if "count" in takes else sum(asker[-1] for asker in batch)
        if len(rows) >= wanted > 1 and rows[0]["job_id"] is not None:
            self._plenty.add(queue)
        return rows

    async def _run(
        self, operation: Operation, batch: Sequence[Sequence[Any]], takes: dict[str, Any]
    ) -> Sequence[Row]:
        given = {name: _json(value) if name in _LISTS else value for name, value in takes.items()}
        if operation.batch:
            given["batch"] = _json(in_hex(batch) if self._client == "libsql" else batch)

        def step(connection: sqlite3.Connection) -> list[Row]:
            given["now_ms"] = now_ms(connection)
            rows: list[Row] = []
            for statement in operation.statements:
                try:
                    rows = connection.execute(statement, given).fetchall()
                except sqlite3.OperationalError as error:
                    if "Could not decode to UTF-8" not in str(error):
                        raise
                    rows = _tolerant(connection, statement, given)
            return rows

        file = self._opened()
        if operation.name in READS:
            await self._prepared(file)
            return await file.read(step)  # type: ignore[no-any-return]
        try:
            return await file.write(step)  # type: ignore[no-any-return]
        except StoreUnreachable as error:  # nothing was written
            if "disk is full" not in str(error):
                raise
            await file.write(mend_places)
            return await file.write(step)  # type: ignore[no-any-return]

    async def _prepared(self, file: SqliteFile) -> None:
        """A reader cannot make the tables: the writer is asked for once."""
        if not file.prepared:
            await file.write(lambda connection: None)

    def _box(self, table: str) -> Operations:
        box = self._operations.get(table)
        if box is None:
            words = sqlite_words(table)
            box = self._operations[table] = Operations(PACKAGE, "sqlite", words)
        return box

    def _opened(self) -> SqliteFile:
        if self._file is None:
            self._file = open_file(
                self.path, self._synchronous, prepare, self._client, queues_with_work
            )
        return self._file

    def bell(self, queue: str) -> Bell:
        return SqliteBell(self.path, queue)

    def journal_bell(self, queue: str) -> Bell:
        return SqliteJournalBell(self.path)

    async def settled_position(self) -> int:
        """There is one writer, so what is committed is complete."""
        return int((await self.run(OUTBOX, "journal_end"))[0]["seq"])

    async def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            await asyncio.to_thread(close_file, file)


class SqliteBell:
    """Rings for one of all who wait for a queue, after a process of ours gave it work.

    A claimer that took all it asked for comes back at once while it has free slots. A ring is kept
    for it for that long, and then passed on: were others woken at every claim, all processes would
    work on what one can do, in the smallest batches. What others write is found by the look that
    follows a wait, and so is a ring that died with the process that kept it.
    """

    def __init__(self, path: Path, queue: str) -> None:
        self._folder = path.with_name(path.name + PIPES_SUFFIX)
        self._queue = queue
        self._rung = asyncio.Event()
        self._listener: Listener | None = None
        self._listens = False
        self._keeping: asyncio.TimerHandle | None = None

    async def arm(self) -> bool:
        if self._keeping is not None:
            self._keeping.cancel()
        if self._listener is None:
            self._listener = Listener(self._folder, self._queue, self._rung.set)
        self._listens = self._listener.open()
        rung = self._rung.is_set()
        self._rung.clear()
        return rung

    async def wait(self, wait_ms: int) -> None:
        if not self._listens:
            wait_ms = min(wait_ms, POLL_EVERY_MS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._rung.wait(), wait_ms / 1000)
        self._rung.clear()

    async def rest(self, *, more: bool) -> None:
        if more:
            self._rung.set()
        self._keeping = asyncio.get_running_loop().call_later(_KEEP_S, self._pass_on)

    def _pass_on(self) -> None:
        unheard = self._listener is not None and self._listener.close()
        if unheard or self._rung.is_set():
            self._rung.clear()
            notify(self._folder, self._queue)

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        self._pass_on()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.remove()


class SqliteJournalBell:
    """Rings when any process has written to the file's log, and when one of ours committed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rung = asyncio.Event()
        self._watch: FileWatcher | None = None

    async def arm(self) -> bool:
        if self._watch is None:
            names = (self._path.name + "-wal", self._path.name + NEXT_SUFFIX)
            self._watch = FileWatcher(self._path.parent, names, self._rung.set)
        self._rung.clear()
        return False

    async def wait(self, wait_ms: int) -> None:
        if self._watch is None or not self._watch.is_active:
            wait_ms = min(wait_ms, POLL_EVERY_MS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._rung.wait(), wait_ms / 1000)

    async def rest(self, *, more: bool) -> None:
        """Everybody hears a write: there is none to pass on."""

    async def close(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()


def _tolerant(connection: sqlite3.Connection, statement: str, given: dict[str, Any]) -> list[Row]:
    """The rows of a SELECT of which some hold bytes that are no text."""
    connection.text_factory = bytes
    try:
        cursor = connection.execute(statement, given)
        names = [column[0] for column in cursor.description]
        return [UnreadableRow(names, tuple(row)) for row in cursor.fetchall()]
    finally:
        connection.text_factory = str


def _json(value: Any) -> str:
    """A list as one text; bytes in it become base64."""
    return msgspec.json.encode(value).decode()
