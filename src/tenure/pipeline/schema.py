"""The event as a row: the journal's schema for Arrow and for Spark, with its version.

Beside the fields of `JournalEvent` a row has `journal`, the name of the history it comes from, and
`pos`, its position there as one rising number. A lake written by an older version is read with the
newest schema: a column that did not exist then is null.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tenure.core.encoding import TIME_MS_MAX
from tenure.core.journal import JournalEvent

SCHEMA_VERSION = 1
# Types of rows that are no events: see `source.journal.markers_of`.
OFFSET, GAP = "offset", "gap"
# Rows of gaps have this instead of a journal's name, so that they are found without a scan.
GAPS = "gaps"

_SHORT = {"ver", "attempt", "max_attempts", "priority"}


def _columns() -> list[tuple[str, str]]:
    columns = [("journal", "string"), ("pos", "bigint")]
    for field in msgspec.structs.fields(JournalEvent):
        kind = "string" if field.type is str else "int" if field.name in _SHORT else "bigint"
        columns.append((field.name, kind))
    return columns


COLUMNS = _columns()
NAMES = tuple(name for name, _ in COLUMNS)
DDL = ", ".join(f"{name} {kind}" for name, kind in COLUMNS)

_KINDS = dict(COLUMNS)
_INT64 = 2**63
_ARROW = {"string": pa.string(), "int": pa.int32(), "bigint": pa.int64()}
ARROW = pa.schema(
    [pa.field(name, _ARROW[kind]) for name, kind in COLUMNS],
    metadata={"tenure.schema": str(SCHEMA_VERSION)},
)

# Numbers of an event that Spark computes with: times up to the year 9999, others so small that no
# sum or difference of a few overflows. Another program may have written any.
_COUNT_MAX = {"int": 2**31 - 1, "bigint": 2**53}
_SIGNED = {"priority"}

_REDIS_SEQ = re.compile(r"(\d+)-(\d+)(?:\.(\d+))?")
_LINE_BITS, _ENTRY_BITS = 7, 15
LINE_MAX, ENTRY_MAX = (1 << _LINE_BITS) - 1, (1 << _ENTRY_BITS) - 1
MS_MAX = (1 << (63 - _ENTRY_BITS - _LINE_BITS)) - 1
"""The last time that a position can have, in the year 2039; later ones, of a writer who chose the
ids of his entries, count as this one."""


def ddl_of(names: Sequence[str]) -> str:
    """The schema of some columns, in their usual order."""
    return ", ".join(f"{name} {kind}" for name, kind in COLUMNS if name in names)


def position_number(seq: str) -> int:
    """The position of an event as one rising number.

    A number stays as it is. A stream's position has the milliseconds first, then the number within
    the millisecond, then the line; without a line it means the end of the entry.

    >>> [position_number(each) for each in ("17", "1-0.0", "1-0")]
    [17, 4194304, 4194431]
    >>> position_number("1-1.0") > position_number("1-0")
    True
    """
    if seq.isdecimal():
        return min(int(seq), 2**63 - 1)
    found = _REDIS_SEQ.fullmatch(seq)
    if not found:
        return 0
    ms, entry, line = found.groups()
    return stream_position_number(int(ms), int(entry), LINE_MAX if line is None else int(line))


def position_text(number: int, *, is_stream: bool) -> str:
    """The position that has this number.

    >>> position_text(position_number("5-3"), is_stream=True), position_text(17, is_stream=False)
    ('5-3', '17')
    """
    if not number:
        return ""
    if not is_stream:
        return str(number)
    entry = (number >> _LINE_BITS) & ENTRY_MAX
    # The greatest stands for all that are as great.
    return f"{number >> (_LINE_BITS + _ENTRY_BITS)}-{2**64 - 1 if entry == ENTRY_MAX else entry}"


def stream_position_number(ms: int, entry: int, line: int) -> int:
    """The number of a line of a stream entry."""
    head = (min(ms, MS_MAX) << _ENTRY_BITS) | min(entry, ENTRY_MAX)
    return (head << _LINE_BITS) | min(line, LINE_MAX)


def sound_numbers(name: str, column: pa.Array) -> pa.Array:
    """A column of numbers in its type; those that no reader could compute with become 0.

    So a garbled event does not stop the reading of all others, and the audit finds it.
    """
    kind = _KINDS[name]
    most = TIME_MS_MAX if name.endswith("_ms") else _COUNT_MAX[kind]
    least = -most if name in _SIGNED else 0
    if column.type != pa.int64():
        column = column.cast(pa.int64())
    found = pc.min_max(column).as_py()
    if found["min"] is not None and (found["min"] < least or found["max"] > most):
        is_sound = pc.and_(pc.greater_equal(column, least), pc.less_equal(column, most))
        column = pc.if_else(is_sound, column, 0)
    return column.cast(_ARROW[kind])


def rows_of(events: Sequence[JournalEvent], journal: str) -> pa.RecordBatch:
    """Event objects as columns: slow, but correct for any content."""
    columns: list[pa.Array] = []
    for name, kind in COLUMNS:
        if name == "journal":
            values: list[Any] = [journal] * len(events)
        elif name == "pos":
            values = [position_number(event.seq) for event in events]
        else:
            values = [getattr(event, name) for event in events]
        if kind == "string" or name == "pos":
            columns.append(pa.array(values, _ARROW[kind]))
        else:
            known = [value if -_INT64 < value < _INT64 else 0 for value in values]
            columns.append(sound_numbers(name, pa.array(known, pa.int64())))
    return pa.RecordBatch.from_arrays(columns, schema=ARROW)
