"""Journals that are tables of an SQL store, read in ranges of their rising number.

PostgreSQL comes as Arrow straight from its binary COPY; SQLite in pages of rows. A number that a
transaction was given may become visible after a larger one. So the end of a PostgreSQL journal is
the last number given out, once every transaction that was open then has ended: nothing at or before
it is still to come. While one stays open, the journal ends where it ended before.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from leasehold.core.errors import StoreUnreachable, UsageError
from leasehold.core.tape import SqlTape
from leasehold.pipeline.schema import ARROW, COLUMNS
from leasehold.pipeline.source.reel import Head, Range, Read

_PAGE = 10_000
_PATIENCE_S = 5.0
_LOOK_S = 0.005
_DEFAULTS: dict[str, object] = {"string": "", "int": 0, "bigint": 0}


class SqlReel:
    """The table behind a tape."""

    def __init__(self, tape: SqlTape, journal: str) -> None:
        self._tape = tape
        self._journal = journal
        self._database: _Database = _open(tape)

    def head(self) -> Head:
        """What is there for good."""
        tape = self._tape
        settled = self._database.settled()
        if settled is None:  # somebody keeps a transaction open: nothing new is certain yet
            return Head()
        where = f"{tape.where} AND {tape.seq} <= {settled:d}"
        query = f"SELECT min({tape.seq}), max({tape.seq}) FROM {tape.table} WHERE {where}"  # noqa: S608
        first, last = self._database.rows(query)[0]
        return Head(first=str(first), last=str(last)) if last is not None else Head()

    def bound(self, after: str, units_max: int, head: Head) -> str:
        """Exactly: the number of the last row of so many."""
        tape = self._tape
        query = (
            f"SELECT max(n) FROM (SELECT {tape.seq} AS n FROM {tape.table} WHERE {tape.where} "  # noqa: S608
            f"AND {tape.seq} > {int(after or 0)} AND {tape.seq} <= {int(head.last)} "
            f"ORDER BY {tape.seq} LIMIT {units_max:d}) AS some"
        )
        last = self._database.rows(query)[0][0]
        return str(last) if last is not None else head.last

    def split(self, after: str, upto: str, parts: int) -> list[Range]:
        """Into spans of equal numbers."""
        begin, end = int(after or 0), int(upto)
        cuts = sorted({begin + (end - begin) * n // parts for n in range(1, parts)} - {begin, end})
        edges = [after, *map(str, cuts), upto]
        return list(pairwise(edges))

    def read(self, after: str, upto: str, seen: Read) -> Iterator[pa.RecordBatch]:
        """In the order of the number."""
        tape = self._tape
        named = ", ".join(_column(name, tape) for name, _ in COLUMNS if _is_read(name, tape))
        query = (
            f"SELECT {named} FROM {tape.table} WHERE {tape.where} AND {tape.seq} > "  # noqa: S608
            f"{int(after or 0)} AND {tape.seq} <= {int(upto)} ORDER BY pos"
        )
        for batch in self._database.batches(query):
            rows = self._conformed(batch)
            seen.units += rows.num_rows
            seen.rows += rows.num_rows
            yield rows

    def captured(self, upto: str) -> None:
        """These stores trim by age alone."""

    def close(self) -> None:
        """Close the connection."""
        self._database.close()

    def _conformed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        known = {"journal": self._journal, "contract": self._tape.contract}
        if "queue" not in self._tape.fields:
            known["queue"] = self._tape.queue
        columns = []
        for field, (name, kind) in zip(ARROW, COLUMNS, strict=True):
            if name in batch.schema.names:
                column = batch.column(name).cast(field.type)
            else:
                value = known.get(name, _DEFAULTS[kind])
                column = pa.repeat(pa.scalar(value, field.type), batch.num_rows)
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=ARROW)


def _is_read(name: str, tape: SqlTape) -> bool:
    return name in ("pos", "seq") or name in tape.fields


def _column(name: str, tape: SqlTape) -> str:
    if name == "pos":
        return f"{tape.seq} AS pos"
    if name == "seq":
        return f"CAST({tape.seq} AS text) AS seq"
    return f"{name} AS {name}"


class _Database(Protocol):
    """The few things that differ between the two."""

    def settled(self) -> int | None:
        """A number up to which nothing is still to come; None if that is not certain now."""

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """A small result."""

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """A large one."""

    def close(self) -> None:
        """Let go of it."""


def _open(tape: SqlTape) -> _Database:
    scheme = urlsplit(tape.store).scheme
    if scheme.startswith("sqlite"):
        return _Sqlite(tape)
    if scheme.startswith("postgres"):
        return _Postgres(tape)
    raise UsageError(f"{scheme}: the journal of such a store cannot be read in bulk")


class _Sqlite:
    """One writer at a time: what is committed is complete."""

    def __init__(self, tape: SqlTape) -> None:
        # sqlite:///jobs.db is a file here, sqlite:////var/jobs.db one by its full path.
        path = unquote(urlsplit(tape.store).path)[1:]
        self._tape = tape
        try:
            self._file = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        except sqlite3.Error as error:
            raise StoreUnreachable(f"sqlite {path}: {error}") from error

    def settled(self) -> int | None:
        """The last number."""
        query = f"SELECT max({self._tape.seq}) FROM {self._tape.table}"  # noqa: S608
        return int(self.rows(query)[0][0] or 0)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """All of it."""
        return self._file.execute(query).fetchall()

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """In pages."""
        cursor = self._file.execute(query)
        names = [column[0] for column in cursor.description]
        while page := cursor.fetchmany(_PAGE):
            columns = [pa.array(column) for column in zip(*page, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, names=names)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Postgres:
    """By ADBC."""

    def __init__(self, tape: SqlTape) -> None:
        try:
            from adbc_driver_postgresql import dbapi
        except ImportError:
            raise UsageError(
                "reading PostgreSQL in bulk needs its ADBC driver; "
                "pip install adbc-driver-postgresql"
            ) from None
        self._tape = tape
        try:
            self._connection: Any = dbapi.connect(tape.store, autocommit=True)
        except dbapi.Error as error:
            raise StoreUnreachable(str(error).strip()) from error

    def settled(self) -> int | None:
        """The last number given out, when all who were writing then have ended."""
        source = self._tape.sequence
        given = f"SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {source}"  # noqa: S608
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
        with self._connection.cursor() as cursor:
            cursor.execute(query)
            found: list[tuple[Any, ...]] = cursor.fetchall()
            return found

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """As they come."""
        with self._connection.cursor() as cursor:
            cursor.execute(query)
            yield from cursor.fetch_record_batch()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _snapshot(self, edge: str) -> int:
        return int(self.rows(f"SELECT {edge}(pg_current_snapshot())::text::bigint")[0][0])
