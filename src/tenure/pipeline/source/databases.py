"""What differs between PostgreSQL and SQLite when their journal tables are read.

PostgreSQL returns Arrow batches (ADBC reads its binary COPY); SQLite returns pages of rows.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from tenure.core.errors import ServerError, StoreUnreachable, UsageError
from tenure.core.journal import SqlFormat

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
