"""Packs rows of integers into one compressed value for each part.

Values that are usually equal in a correct job are stored as differences, which are mostly zero. So
a row of eighty bytes takes about twelve.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tenure.pipeline.audit.hashing import Hashes, Ints
from tenure.pipeline.audit.proof import (
    CLAIM_POS,
    HI,
    LAST_POS,
    MAX_POS,
    SUBMIT_POS,
    X,
)

_CODEC = "lz4_raw"
_HEAD = 8


def by_part(rows: Ints, keys: Hashes, parts: int) -> tuple[list[int], list[bytes]]:
    """Rows divided by part: the numbers of the parts that have rows, and their packed rows."""
    part = ((keys >> np.uint64(32)) % np.uint64(parts)).astype(np.uint16)
    sizes = np.bincount(part, minlength=parts)
    ordered = np.take(rows, np.argsort(part, kind="stable"), axis=1)
    ends = np.cumsum(sizes)
    numbers = np.flatnonzero(sizes).tolist()
    return numbers, [pack(ordered[:, ends[n] - sizes[n] : ends[n]]) for n in numbers]


def pack(rows: Ints) -> bytes:
    """Some rows as one value."""
    whole = rows.tobytes()
    packed: bytes = pa.Codec(_CODEC).compress(whole, asbytes=True)
    return len(whole).to_bytes(_HEAD, "little") + packed


def unpack(values: Iterable[Any], names: Sequence[str]) -> Ints:
    """All rows of some values; `names` are those of their columns."""
    codec = pa.Codec(_CODEC)
    wide = [np.empty((len(names), 0), np.int64)]
    for value in values:
        seen = memoryview(value)
        size = int.from_bytes(seen[:_HEAD], "little")
        whole = codec.decompress(seen[_HEAD:], size)
        wide.append(np.frombuffer(whole, np.int64).reshape(len(names), -1))
    return np.concatenate(wide, axis=1)


def shrunk(rows: Ints) -> Ints:
    """Rows of the proof, with differences for values that are equal in a correct job."""
    small = rows.copy()
    small[X] -= rows[HI]
    small[LAST_POS] -= rows[MAX_POS]
    small[MAX_POS] -= rows[SUBMIT_POS]
    small[CLAIM_POS] -= rows[SUBMIT_POS]
    return small


def restored(small: Ints) -> Ints:
    """The rows that were shrunk; in place."""
    small[CLAIM_POS] += small[SUBMIT_POS]
    small[MAX_POS] += small[SUBMIT_POS]
    small[LAST_POS] += small[MAX_POS]
    small[X] += small[HI]
    return small
