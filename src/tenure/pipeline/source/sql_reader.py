"""Reads journals that are SQL tables, in ranges of their sequence number.

A row with a smaller number may become visible after one with a larger number, because its
transaction committed later. So the end of a PostgreSQL journal is the last number given out, once
all transactions that were open at that time have ended: no row at or before it is still to come.
Until they have ended, the journal keeps its earlier end.

No database counts the rows that were ever in a table. But the oldest rows are trimmed first (except
the submits of jobs that still exist), and their numbers stay missing. So all rows that were trimmed
unread come before the first row that is not such a submit, and there are at most as many as numbers
are missing there. The same holds for the versions of a job.

PostgreSQL returns Arrow batches (ADBC reads its binary COPY); SQLite returns pages of rows. The
position of a reader is the only thing that capture writes into the ledger.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from tenure.core.errors import ServerError, StoreUnreachable, UsageError
from tenure.core.journal import SqlFormat
from tenure.pipeline.schema import ARROW, COLUMNS, sound_numbers
from tenure.pipeline.source.ranges import Head, Loss, Range, Read
from tenure.sql import open_engine
from tenure.sql.sql_ledger import JournalReaders

_DEFAULTS: dict[str, object] = {"string": "", "int": 0, "bigint": 0}
_STATES = ("from_state", "to_state")
# How far to look back for a row that trimming would have taken.
_LOOK_BACK = 10_000


class SqlRangeReader:
    """Reads the table that a `SqlFormat` describes."""

    def __init__(self, fmt: SqlFormat, journal: str) -> None:
        self._format = fmt
        self._journal = journal
        self._rows = fmt.narrow or fmt.table
        self._database: Database = open_database(fmt)

    def head(self) -> Head:
        """What is settled: rows that no open transaction can precede."""
        fmt = self._format
        settled = self._database.settled()
        if settled is None:  # a transaction stays open: nothing new is certain yet
            return Head()
        query = (
            f"SELECT min({fmt.seq}), max({fmt.seq}) FROM {self._rows} "  # nosec B608 # names of the format
            f"WHERE {fmt.where} AND {fmt.seq} <= {settled:d}"
        )
        first, last = self._database.rows(query)[0]
        if last is None:
            return Head(end=str(settled))
        return Head(first=str(first), last=str(last), end=str(settled))

    def bound(self, after: str, rows_max: int, head: Head) -> str:
        """Exactly: the number of the last of `rows_max` rows."""
        fmt = self._format
        query = (
            f"SELECT max(n) FROM (SELECT {fmt.seq} AS n FROM {self._rows} WHERE {fmt.where} "  # nosec B608 # names of the format
            f"AND {fmt.seq} > {int(after or 0)} AND {fmt.seq} <= {int(head.last)} "
            f"ORDER BY {fmt.seq} LIMIT {rows_max:d}) AS wanted"
        )
        last = self._database.rows(query)[0][0]
        return str(last) if last is not None else head.last

    def gone(self, head: Head) -> int:
        """The numbers that are missing before the first row that trimming would take."""
        return self._missing(0, head).units if head.end else -1

    def lost(self, after: str, read: int, head: Head) -> Loss:
        """By the numbers that are missing, if rows up to `after` were trimmed."""
        if not after or not head.end or not self._was_trimmed(int(after), read):
            return Loss()
        return self._missing(int(after), head)

    def split(self, after: str, upto: str, parts: int) -> list[Range]:
        """Into ranges of equally many numbers."""
        begin, end = int(after or 0), int(upto)
        cuts = sorted({begin + (end - begin) * n // parts for n in range(1, parts)} - {begin, end})
        edges = [after, *map(str, cuts), upto]
        return list(pairwise(edges))

    def read(self, after: str, upto: str, seen: Read) -> Iterator[pa.RecordBatch]:
        """In the order of the number."""
        fmt = self._format
        named = ", ".join(_column(name, fmt) for name, _ in COLUMNS if _is_read(name, fmt))
        query = (
            f"SELECT {named} FROM {self._rows} WHERE {fmt.where} AND {fmt.seq} > "  # nosec B608 # names of the format
            f"{int(after or 0)} AND {fmt.seq} <= {int(upto)} ORDER BY pos"
        )
        for batch in self._database.batches(query):
            rows = self._conformed(batch)
            seen.units += rows.num_rows
            seen.rows += rows.num_rows
            yield rows

    def captured(self, upto: str, reader: str) -> None:
        """Written to the table that upkeep reads before it trims."""
        if self._format.queues:
            save_position(self._format, reader, int(upto) if upto else None)

    def close(self) -> None:
        """Close the connection."""
        self._database.close()

    def _was_trimmed(self, upto: int, read: int) -> bool:
        """Whether trimming has removed all rows up to there that it may remove.

        If only submits were read and all of them are there, their jobs are checked: a job whose
        version is above 1 must have a second event.
        """
        rows, others = self._database.rows(
            f"SELECT count(*), count(CASE WHEN NOT {self._format.kept} THEN 1 END) "  # nosec B608 # names of the format
            f"FROM ({self._before(upto, '*')}) AS before"
        )[0]
        if others:
            return False
        return bool(rows < min(read, _LOOK_BACK)) or self._lacks_steps(upto)

    def _lacks_steps(self, upto: int) -> bool:
        fmt = self._format
        if not fmt.jobs:
            return True
        step = (
            f"SELECT 1 FROM {self._rows} n WHERE n.job_id = before.job_id AND n.ver = 2 "  # nosec B608 # names of the format
            f"AND n.queue = before.queue AND {fmt.by_job}"
        )
        query = (
            f"SELECT 1 FROM ({self._before(upto, 'job_id, queue')}) AS before "  # nosec B608 # names of the format
            f"JOIN {fmt.jobs} j ON j.job_id = before.job_id AND j.queue = before.queue "
            f"WHERE j.ver > 1 AND NOT EXISTS ({step}) LIMIT 1"
        )
        return bool(self._database.rows(query))

    def _before(self, upto: int, columns: str) -> str:
        fmt = self._format
        return (
            f"SELECT {columns} FROM {self._rows} WHERE {fmt.where} AND {fmt.seq} <= {upto:d} "  # nosec B608 # names of the format
            f"ORDER BY {fmt.seq} DESC LIMIT {_LOOK_BACK}"
        )

    def _missing(self, after: int, head: Head) -> Loss:
        """How many numbers are missing up to the first row that trimming would have removed.

        One number may belong to two events, one of each journal.
        """
        fmt = self._format
        first = (
            f"SELECT {fmt.seq} FROM {self._rows} WHERE {fmt.where} AND NOT {fmt.kept} AND "  # nosec B608 # names of the format
            f"{fmt.seq} > {after:d} AND {fmt.seq} <= {int(head.end)} ORDER BY {fmt.seq} LIMIT 1"
        )
        found = self._database.rows(first)
        upto = int(found[0][0]) if found else int(head.end) + 1
        between = f"{fmt.seq} > {after:d} AND {fmt.seq} < {upto:d}"
        counted = f"SELECT count(DISTINCT {fmt.seq}) FROM {self._rows} WHERE {between}"  # nosec B608 # names of the format
        ours = self._database.rows(f"{counted} AND {fmt.where}")[0][0]
        numbers = upto - after - 1
        if ours == numbers:
            return Loss()
        counted = f"SELECT count(DISTINCT {fmt.seq}) FROM {fmt.table} WHERE {between}"  # nosec B608 # names of the format
        rows = self._database.rows(counted)[0][0]  # of all queues: no index helps
        is_exact = rows == ours and not self._database.has_rollbacks
        return Loss(units=numbers - rows, is_exact=is_exact)

    def _conformed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        known = {"journal": self._journal, "contract": self._format.contract}
        if "queue" not in self._format.fields:
            known["queue"] = self._format.queue
        columns = []
        for field, (name, kind) in zip(ARROW, COLUMNS, strict=True):
            if name in batch.schema.names:
                column = batch.column(name)
                if kind == "string":
                    column = self._translated(name, column.cast(field.type))
                elif name == "pos":
                    column = column.cast(field.type)
                else:
                    column = sound_numbers(name, column)
            else:
                value = known.get(name, _DEFAULTS[kind])
                column = pa.repeat(pa.scalar(value, field.type), batch.num_rows)
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=ARROW)

    def _translated(self, name: str, column: pa.Array) -> pa.Array:
        """Stored states and queue names, as the contract calls them."""
        fmt = self._format
        if fmt.states and name in _STATES:
            stored = pa.array([one for one, _ in fmt.states], pa.string())
            words = pa.array([other for _, other in fmt.states], pa.string())
            return words.take(pc.index_in(column, value_set=stored))
        if fmt.queue_prefix and name == "queue":
            return pc.utf8_slice_codeunits(column, len(fmt.queue_prefix))
        return column


def _is_read(name: str, fmt: SqlFormat) -> bool:
    return name in ("pos", "seq") or name in fmt.fields


def _column(name: str, fmt: SqlFormat) -> str:
    if name == "pos":
        return f"{fmt.seq} AS pos"
    if name == "seq":
        return f"CAST({fmt.seq} AS text) AS seq"
    return f"{name} AS {name}"


_PAGE = 10_000
_PATIENCE_S = 5.0
_LOOK_S = 0.005


class Database(Protocol):
    """What `SqlRangeReader` needs of a database.

    `has_rollbacks`: numbers may be missing though no row was removed.
    """

    has_rollbacks: bool

    def settled(self) -> int | None:
        """A number such that no row up to it is still to come; None if there is none now."""

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """A small result."""

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """A large one."""

    def close(self) -> None:
        """Close the connection."""


def open_database(fmt: SqlFormat) -> Database:
    """The database that a `SqlFormat` names."""
    scheme = urlsplit(fmt.store).scheme
    if scheme in ("sqlite", "libsql"):  # the same file, by another client
        return SqliteFile(fmt)
    if scheme.startswith("postgres"):
        return PostgresServer(fmt)
    raise UsageError(f"{scheme}: the journal of such a store cannot be read in bulk")


class SqliteFile:
    """SQLite has one writer at a time: no gaps by open transactions, none by rollbacks."""

    has_rollbacks = False

    def __init__(self, fmt: SqlFormat) -> None:
        # sqlite:///jobs.db is a file here, sqlite:////var/jobs.db one by its full path.
        path = unquote(urlsplit(fmt.store).path)[1:]
        self._format = fmt
        try:
            self._file = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        except sqlite3.Error as error:
            raise StoreUnreachable(f"sqlite {path}: {error}") from error

    def settled(self) -> int | None:
        """The last number that was ever given, also if its row was removed."""
        numbered = self._format.sequence or self._format.table
        given = f"SELECT max(seq) FROM sqlite_sequence WHERE name = '{numbered}'"  # nosec B608 # a name of the format
        return int(self.rows(given)[0][0] or 0)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """All of it."""
        with _store_errors(sqlite3.Error):
            return self._file.execute(query).fetchall()

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """In pages."""
        with _store_errors(sqlite3.Error):
            cursor = self._file.execute(query)
        names = [column[0] for column in cursor.description]
        for page in self._pages(query, cursor):
            columns = [pa.array(column) for column in zip(*page, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, names=names)

    def _pages(self, query: str, cursor: sqlite3.Cursor) -> Iterator[list[tuple[Any, ...]]]:
        """The pages of a query; if a text is not UTF-8, with U+FFFD in its place."""
        pages = 0
        while True:
            try:
                page = cursor.fetchmany(_PAGE)
            except sqlite3.OperationalError as error:
                if self._file.text_factory is not str or "UTF-8" not in str(error):
                    raise
                # Not from the beginning: it takes several times as long.
                self._file.text_factory = partial(str, encoding="utf-8", errors="replace")
                cursor = self._file.execute(query)
                for _ in range(pages):
                    cursor.fetchmany(_PAGE)
                continue
            if not page:
                return
            pages += 1
            yield page

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class PostgresServer:
    """PostgreSQL, read by ADBC."""

    has_rollbacks = True

    def __init__(self, fmt: SqlFormat) -> None:
        try:
            from adbc_driver_postgresql import dbapi
        except ImportError:
            raise UsageError(
                "reading PostgreSQL in bulk needs its ADBC driver; "
                "pip install adbc-driver-postgresql"
            ) from None
        from tenure.store.postgres.address import libpq_url  # loads the driver of the queues

        self._format = fmt
        self._errors: type[Exception] = dbapi.Error
        try:
            # Without autocommit: a pooler may give every transaction to another session, and what
            # the driver prepares must be in the session that runs it.
            self._connection: Any = dbapi.connect(libpq_url(fmt.store))
        except dbapi.Error as error:
            raise StoreUnreachable(str(error).strip()) from error

    def settled(self) -> int | None:
        """The last number given out, when all who were writing then have ended."""
        source = self._format.sequence
        given = f"SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {source}"  # nosec B608 # a name of the format
        last = int(self.rows(given)[0][0])
        wanted = self._snapshot("pg_snapshot_xmax")
        until = time.monotonic() + _PATIENCE_S
        while self._snapshot("pg_snapshot_xmin") < wanted:
            if time.monotonic() > until:
                return None
            time.sleep(_LOOK_S)
        return last

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """All of it."""
        with self._transaction() as cursor:
            cursor.execute(query)
            found: list[tuple[Any, ...]] = cursor.fetchall()
            return found

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """As they come."""
        with self._transaction() as cursor:
            cursor.execute(query)
            yield from cursor.fetch_record_batch()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """A cursor; its transaction only reads, and ends at once, so that it holds nothing back."""
        with _store_errors(self._errors):
            try:
                with self._connection.cursor() as cursor:
                    yield cursor
            finally:
                self._connection.rollback()

    def _snapshot(self, edge: str) -> int:
        return int(self.rows(f"SELECT {edge}(pg_current_snapshot())::text::bigint")[0][0])


@contextmanager
def _store_errors(errors: type[Exception]) -> Iterator[None]:
    """Errors of the driver as `ServerError`, with the first line of their text."""
    try:
        yield
    except errors as error:
        said = str(error).strip().partition("\n")[0]
        raise ServerError(f"the journal cannot be read: {said}") from error


def save_position(fmt: SqlFormat, reader: str, position: int | None) -> None:
    """Store a reader's position; None removes the reader."""
    # In a thread: the caller may run in an event loop, where `asyncio.run` is not allowed.
    with ThreadPoolExecutor(1, thread_name_prefix="tell") as apart:
        apart.submit(asyncio.run, _save_position(fmt, reader, position)).result()


async def _save_position(fmt: SqlFormat, reader: str, position: int | None) -> None:
    # The journal is read by Python's own SQLite client, whatever the URL says. Two clients in one
    # process release each other's locks.
    store = fmt.store.replace("libsql:", "sqlite:", 1)
    postgres = store.startswith("postgres")
    engine = open_engine(store, {"schema": fmt.schema} if postgres else {})
    readers = JournalReaders(engine, fmt.queues)
    try:
        if position is None:
            await readers.forget(reader)
        else:
            await readers.note(reader, position)
    finally:
        await engine.close()
