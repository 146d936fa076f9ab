"""Reads journals that are SQL tables, in ranges of their sequence number.

A row with a smaller number may become visible after one with a larger number, because its
transaction committed later. So the end of a PostgreSQL journal is the last number given out, once
all transactions that were open at that time have ended: no row at or before it is still to come.
Until they have ended, the journal keeps its earlier end.

No database counts the rows that were ever in a table. But the oldest rows are trimmed first (except
the submits of jobs that still exist), and their numbers stay missing. So all rows that were trimmed
unread come before the first row that is not such a submit, and there are at most as many as numbers
are missing there. The same holds for the versions of a job.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from tenure.core.journal import SqlFormat
from tenure.pipeline.schema import ARROW, COLUMNS, sound_numbers
from tenure.pipeline.source.databases import Database, open_database
from tenure.pipeline.source.ledgers import save_position
from tenure.pipeline.source.range_reader import Head, Loss, Range, Read

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
