"""The event as a row: the journal's schema for Arrow and for Spark, with its version.

Beside the fields of `JournalEvent` a row has `journal`, the name of the history it comes from, and
`pos`, its position there as one rising number. A lake written by an older version is read with the
newest schema: a column that did not exist then is null.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pyarrow as pa

from tenure.core.journal import JournalEvent

SCHEMA_VERSION = 1

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

_ARROW = {"string": pa.string(), "int": pa.int32(), "bigint": pa.int64()}
ARROW = pa.schema(
    [pa.field(name, _ARROW[kind]) for name, kind in COLUMNS],
    metadata={"tenure.schema": str(SCHEMA_VERSION)},
)

_REDIS_SEQ = re.compile(r"(\d+)-(\d+)(?:\.(\d+))?")
_LINE_BITS, _ENTRY_BITS = 7, 15
LINE_MAX, ENTRY_MAX = (1 << _LINE_BITS) - 1, (1 << _ENTRY_BITS) - 1


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
        return int(seq)
    found = _REDIS_SEQ.fullmatch(seq)
    if not found:
        return 0
    ms, entry, line = found.groups()
    return stream_position_number(int(ms), int(entry), LINE_MAX if line is None else int(line))


def stream_position_number(ms: int, entry: int, line: int) -> int:
    """The number of a line of a stream entry."""
    head = (ms << _ENTRY_BITS) | min(entry, ENTRY_MAX)
    return (head << _LINE_BITS) | min(line, LINE_MAX)


def rows_of(events: Sequence[JournalEvent], journal: str) -> pa.RecordBatch:
    """Event objects as columns: slow, but correct for any content."""
    columns: list[pa.Array] = []
    for name, kind in COLUMNS:
        if name == "journal":
            values: list[object] = [journal] * len(events)
        elif name == "pos":
            values = [position_number(event.seq) for event in events]
        else:
            values = [getattr(event, name) for event in events]
        columns.append(pa.array(values, _ARROW[kind]))
    return pa.RecordBatch.from_arrays(columns, schema=ARROW)
