"""Columns as rows of COPY: the same bytes as a packer writes that goes row by row."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tenure.pipeline.source.copying import fixed, packed, rows_of


def by_row(rows: Iterable[list[bytes | None]]) -> bytes:
    """The binary form of COPY, written row by row."""
    whole = b"PGCOPY\n\xff\r\n\0" + bytes(8)
    for row in rows:
        whole += struct.pack(">h", len(row))
        for value in row:
            whole += struct.pack(">i", -1 if value is None else len(value)) + (value or b"")
    return whole + b"\xff\xff"


ROWS = st.lists(
    st.tuples(st.integers(-(2**63), 2**63 - 1), st.text(max_size=9), st.integers(-9, 9)), min_size=1
)


@given(ROWS, st.text(max_size=5), st.booleans())
def test_columns_become_the_bytes_of_their_rows(
    rows: list[tuple[int, str, int]], task: str, ready: bool
) -> None:
    seq, text, priority = map(list, zip(*rows, strict=True))
    columns = [
        pa.array(seq, pa.int64()),
        pa.array(text, pa.string()),
        pa.array(priority, pa.int32()),
    ]
    same = {"task": task, "ready": ready, "max_attempts": 3, "refresh_url": None, "ts_ms": 2**40}
    shared = [packed(name, value) for name, value in same.items()]
    own = [
        [packed("seq", number), packed("payload", words), packed("priority", first)]
        for number, words, first in rows
    ]
    assert rows_of(columns, shared) == by_row([*row, *shared] for row in own)


@given(ROWS)
def test_a_slice_of_a_column_is_packed_without_what_lies_beside_it(
    rows: list[tuple[int, str, int]],
) -> None:
    texts = [text for _, text, _ in rows]
    sliced = pa.array(["before", *texts, "behind"]).slice(1, len(rows))
    assert rows_of([sliced], []) == by_row([text.encode()] for text in texts)


def test_values_are_packed_by_their_type() -> None:
    given = {"a": "é", "refresh_url": None, "priority": 7, "ready": True, "ts_ms": -1}
    values = [packed(name, value) for name, value in given.items()]
    assert values == ["é".encode(), None, b"\0\0\0\7", b"\1", b"\xff" * 8]


def test_bytes_are_cut_to_one_width() -> None:
    assert fixed(b"aabbcc", 2).to_pylist() == [b"aa", b"bb", b"cc"]
    assert fixed(b"", 2).to_pylist() == []
