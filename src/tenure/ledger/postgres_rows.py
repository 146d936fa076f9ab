"""Rows in the binary form of COPY, put together column by column.

A value that all rows share is packed once, and a column that goes into two tables once for both: of
a job's first rows that is most of them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

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
