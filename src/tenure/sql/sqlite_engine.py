"""The SQL queues on SQLite: an operation is a few statements in one transaction."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tenure.core.errors import StoreUnreachable
from tenure.sql.claim import UnreadableRow
from tenure.sql.engine import INBOX, OUTBOX, PACKAGE, RUNNING, QueueListener, Row, part, words_of
from tenure.sql.operations import Operation, Operations
from tenure.sql.schema import mend_places, prepare, queues_with_work
from tenure.store.libsql import in_hex
from tenure.store.notifying import Listener, notify
from tenure.store.sqlite import BELLS, SqliteFile, close_file, file_of, now_ms, open_file
from tenure.store.turnstile import NEXT
from tenure.store.watching import LOOK_EVERY_MS, FileWatch

# An event that ended lets the next one of its job into the line in the same step.
_RELEASE_NEXT = """
UPDATE {table} SET ready = 1 WHERE seq IN (
  SELECT min(x.seq) FROM temp.{moved} h
  JOIN {table} d ON d.{key} = h.{key} AND d.status IN ('succeeded', 'dead_letter')
  JOIN {table} x ON x.gid = d.gid AND x.status NOT IN ('succeeded', 'dead_letter')
  GROUP BY d.gid
) AND status = 'queued' AND due_ms = 0;"""
# An event waits for the earlier events of its job, whatever its flag says.
_IN_TURN = (
    f"(SELECT earlier.seq FROM {OUTBOX} earlier WHERE earlier.gid = j.gid"  # nosec B608 # a constant
    " AND earlier.seq < j.seq AND earlier.status NOT IN ('succeeded', 'dead_letter')"
    " LIMIT 1) IS NULL"
)
_SILENT = dict.fromkeys(
    ("count_event", "tell_taken", "tell_ended", "tell_decided", "tell_succeeded"), ""
)


# A requester has no more jobs at once than its quota, nor all the slots of a worker.
_WITHIN_SHARE = f"""(j.requester_id = '' OR j.requester_id NOT IN (
    SELECT r.requester_id FROM {INBOX} r LEFT JOIN api_keys k ON k.key_id = r.requester_id
    WHERE r.queue = :queue AND r.lease_expires_at > 0 AND r.status IN {RUNNING}
    GROUP BY r.requester_id
    HAVING sum(r.worker_id = :worker_id) >= :share OR count(*) >= coalesce(
      nullif(coalesce(json_extract(k.quota, '$.transcodes'), :requester_max), 0), 1 << 31)))"""  # nosec B608 # names of ours


def sqlite_words(table: str) -> dict[str, str]:
    """The fragments that make the statements of one box."""
    words = words_of(table, ":now_ms") | {
        **dict.fromkeys(("after_complete", "after_decide"), ""),
        "history": "job_journal",
    }
    if table == OUTBOX:
        words |= {"in_turn": _IN_TURN, "history": part("sqlite", "event_history")}
        words["after_settle"] = _RELEASE_NEXT.format(table=table, moved="ending", key="job_id")
        words["after_complete"] = _RELEASE_NEXT.format(table=table, moved="succeeding", key="seq")
        words["after_decide"] = _RELEASE_NEXT.format(table=table, moved="chosen", key="job_id")
    if table == INBOX:
        return words | _telling() | {"share": _WITHIN_SHARE}
    return words | {**_SILENT, "told": "0"}


def _telling() -> dict[str, str]:
    """Of the inbox: who counts the event of a step writes it too, in the same transaction."""
    return {
        "count_event": ", event_count = j.event_count + (j.status_webhook_url IS NOT NULL)",
        "told": "CASE WHEN j.status_webhook_url IS NULL THEN 0 ELSE j.event_count END",
        "tell_taken": _tell("taking", "seq", "turn"),
        "tell_ended": _tell("ending", "job_id", "n"),
        "tell_decided": _tell("chosen", "job_id", "n"),
        "tell_succeeded": _tell("succeeding", "seq", "n"),
    }


def _tell(moved: str, key: str, order: str) -> str:
    text = part("sqlite", "tell").replace("{moved}", f"temp.{moved}")
    return text.replace("{key}", key).replace("{order}", order)


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

    def bell(self, queue: str) -> QueueListener:
        return SqliteListener(self.path, queue)

    def journal_bell(self, queue: str) -> QueueListener:
        return SqliteJournalListener(self.path)

    async def settled_position(self) -> int:
        """There is one writer, so what is committed is complete."""
        return int((await self.run(OUTBOX, "journal_end"))[0]["seq"])

    async def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            await asyncio.to_thread(close_file, file)


class SqliteListener:
    """Rings for one of all who wait for a queue, after a process of ours gave it work.

    A claimer that took all it asked for comes back at once while it has free slots. A ring is kept
    for it for that long, and then passed on: were others woken at every claim, all processes would
    work on what one can do, in the smallest batches. What others write is found by the look that
    follows a wait, and so is a ring that died with the process that kept it.
    """

    def __init__(self, path: Path, queue: str) -> None:
        self._folder = path.with_name(path.name + BELLS)
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
            wait_ms = min(wait_ms, LOOK_EVERY_MS)
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


class SqliteJournalListener:
    """Rings when any process has written to the file's log, and when one of ours committed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rung = asyncio.Event()
        self._watch: FileWatch | None = None

    async def arm(self) -> bool:
        if self._watch is None:
            names = (self._path.name + "-wal", self._path.name + NEXT)
            self._watch = FileWatch(self._path.parent, names, self._rung.set)
        self._rung.clear()
        return False

    async def wait(self, wait_ms: int) -> None:
        if self._watch is None or not self._watch.is_told:
            wait_ms = min(wait_ms, LOOK_EVERY_MS)
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
