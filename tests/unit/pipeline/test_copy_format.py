"""Columns as rows of COPY: the same bytes as a packer writes that goes row by row."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tenure.pipeline.source.copy_format import fixed, rows_of, values_of
from tenure.sql.postgres_engine import PackedRows

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
    by_row = PackedRows().rows(len(rows), {"seq": seq, "payload": text, "priority": priority}, same)
    shared = values_of(PackedRows().rows(1, {}, same))
    assert rows_of(columns, shared) == by_row


@given(ROWS)
def test_a_slice_of_a_column_is_packed_without_what_lies_beside_it(
    rows: list[tuple[int, str, int]],
) -> None:
    texts = [text for _, text, _ in rows]
    sliced = pa.array(["before", *texts, "behind"]).slice(1, len(rows))
    assert rows_of([sliced], []) == PackedRows().rows(len(rows), {"a": texts}, {})


def test_the_values_of_a_row_are_read_back() -> None:
    row = PackedRows().rows(1, {"a": ["é"]}, {"refresh_url": None, "priority": 7, "ready": True})
    assert values_of(row) == ["é".encode(), None, b"\0\0\0\7", b"\1"]


def test_bytes_are_cut_to_one_width() -> None:
    assert fixed(b"aabbcc", 2).to_pylist() == [b"aa", b"bb", b"cc"]
    assert fixed(b"", 2).to_pylist() == []
