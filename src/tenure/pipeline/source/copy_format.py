"""Arrow columns as rows in the binary format of PostgreSQL's COPY, without a loop over the rows.

A field is its length and its bytes. Arrow's kernel that joins columns element by element writes all
rows one after the other into a single buffer, and COPY accepts that buffer as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TAIL = b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"
_BYTES = pa.large_binary()  # a batch of long payloads is longer than 2 GB
_SHORT_COLUMNS = frozenset(
    ("priority", "max_attempts", "credential_version", "storage_creds_encryption_version")
)
_NOTHING = pa.scalar(b"", _BYTES)

Part: TypeAlias = "bytes | pa.Array"
"""A part of each row: the same bytes in all rows, or one element per row."""


def rows_of(columns: Sequence[pa.Array], same: Sequence[bytes | None]) -> bytes:
    """Rows of these columns, and after them of values that are the same in all.

    Texts and bytes go as they are, whole numbers with the width of their type.
    """
    parts: list[Part] = [struct.pack(">h", len(columns) + len(same))]
    for column in columns:
        parts += _fields(column)
    parts += [_NULL if value is None else _length(value) + value for value in same]
    joined = pc.binary_join_element_wise(*map(_operand, _merged(parts)), _NOTHING)
    return b"".join((_HEAD, _data(joined), _TAIL))


def packed(name: str, value: Any) -> bytes | None:
    """A single value. Its type follows from the value: text, bytes, boolean, and numbers of 64
    bits, but for the columns that are known as short.
    """
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return bytes([value])
    if isinstance(value, int):
        return value.to_bytes(4 if name in _SHORT_COLUMNS else 8, "big", signed=True)
    return str(value).encode()


def fixed(data: bytes, width: int) -> pa.Array:
    """Elements of one width, cut from their bytes."""
    offsets = np.arange(0, len(data) + 1, width, dtype=np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(_BYTES, len(offsets) - 1, buffers)


def _fields(column: pa.Array) -> list[Part]:
    if pa.types.is_integer(column.type):
        numbers = column.to_numpy().astype(f">i{column.type.bit_width // 8}")
        width = numbers.dtype.itemsize
        return [struct.pack(">i", width), fixed(numbers.tobytes(), width)]
    texts = column.cast(_BYTES)
    lengths = pc.binary_length(texts).to_numpy()
    return [fixed(lengths.astype(">i4").tobytes(), 4), texts]


def _length(value: bytes) -> bytes:
    return struct.pack(">i", len(value))


def _merged(parts: list[Part]) -> list[Part]:
    """Merge neighbouring parts that are the same in all rows."""
    merged: list[Part] = []
    for part in parts:
        if merged and isinstance(part, bytes) and isinstance(merged[-1], bytes):
            merged[-1] += part
        else:
            merged.append(part)
    return merged


def _operand(part: Part) -> pa.Array | pa.Scalar:
    return pa.scalar(part, _BYTES) if isinstance(part, bytes) else part


def _data(joined: pa.Array) -> bytes:
    _, _, data = joined.buffers()
    return bytes(memoryview(data)[: joined.total_values_length])
