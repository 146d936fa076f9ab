"""Arrow columns as rows in the binary form of PostgreSQL's COPY, without a loop over the rows.

Each field is its length and its bytes. The kernel that joins columns element by element leaves all
rows one behind the other in a single buffer: that buffer is what COPY takes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TAIL = b"\xff\xff"
_BYTES = pa.large_binary()  # a batch of long payloads is longer than 2 GB
_NOTHING = pa.scalar(b"", _BYTES)

Part: TypeAlias = "bytes | pa.Array"
"""What every row has at this place: the same bytes, or an element of its own."""


def rows_of(columns: Mapping[str, pa.Array], same: Mapping[str, Any]) -> bytes:
    """Rows of these columns, and after them of values that are the same in all.

    Texts and bytes go as they are, whole numbers with the width of their type; of `same`, numbers
    must be wrapped by numpy to tell how wide they are.
    """
    parts: list[Part] = [struct.pack(">h", len(columns) + len(same))]
    for column in columns.values():
        parts += _fields(column)
    parts += [_field(value) for value in same.values()]
    joined = pc.binary_join_element_wise(*map(_operand, _merged(parts)), _NOTHING)
    return b"".join((_HEAD, _data(joined), _TAIL))


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


def _field(value: Any) -> bytes:
    if isinstance(value, bool):
        data = bytes([value])
    elif isinstance(value, np.integer):
        data = int(value).to_bytes(value.dtype.itemsize, "big", signed=True)
    else:
        data = value.encode()
    return struct.pack(">i", len(data)) + data


def _merged(parts: list[Part]) -> list[Part]:
    """Neighbours that all rows share as one."""
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
