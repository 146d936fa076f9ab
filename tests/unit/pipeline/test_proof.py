"""The proof by columns: what is cut, packed, shared and joined again is what it was."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.pipeline.audit import order, steps
from tenure.pipeline.audit.hashing import Ints, text_hash
from tenure.pipeline.audit.packing import by_part, pack, restored, shrunk, unpack
from tenure.pipeline.audit.proof import ROW, job_keys, joined, merged, proof, unproven
from tenure.pipeline.audit.read_plan import FileSlice, plan_reads
from tenure.pipeline.lake.files import ROWS_IN_GROUP, LakeFiles
from tenure.pipeline.lake.layout import EventFile

LINE_H, PRIORITY = 7, 3


def events(jobs: int) -> pa.RecordBatch:
    """Submit, claim and complete of each, side by side."""
    rows = []
    for number in range(jobs):
        job = {"journal": "j", "contract": "streams", "queue": "q", "job_id": f"job-{number}"}
        rows += [
            job | {"type": "submit", "ver": 1, "to_state": "queued", "pos": number},
            job | {"type": "claim", "ver": 2, "from_state": "queued", "to_state": "running",
                   "fence": 1, "attempt": 1, "lease_until_ms": 9, "pos": jobs + number},
            job | {"type": "complete", "ver": 3, "from_state": "running", "to_state": "done",
                   "fence": 1, "prev_fence": 1, "attempt": 1, "prev_lease_until_ms": 9,
                   "pos": 2 * jobs + number},
        ]  # fmt: skip
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.RecordBatch.from_pylist([dict.fromkeys(names) | row for row in rows])


def lined(rows: Ints) -> list[tuple[int, ...]]:
    return sorted(map(tuple, rows.T.tolist()))


def test_what_a_history_does_not_have_was_not_applicable() -> None:
    rows = proof(events(5))
    assert rows.shape == (len(ROW), 5)
    assert not unproven(rows, quiesced=True).any()


@pytest.mark.parametrize(
    ("event", "column", "value"),
    [
        (0, "to_state", "delayed"),
        (1, "fence", 2),
        (1, "attempt", 2),
        (1, "lease_until_ms", 8),
        (1, "lease_until_ms", 0),
        (1, "from_state", "running"),
        (2, "prev_fence", 0),
        (2, "ver", 4),
        (2, "ver", 2),
        (2, "worker_id", "another"),
        (2, "type", "extend"),
        (2, "to_state", "queued"),
        (2, "pos", 1),
    ],
)
def test_no_job_with_one_wrong_number_or_word_is_proven(
    event: int, column: str, value: object
) -> None:
    rows = events(3).to_pylist()
    rows[3 + event][column] = value
    names = dict.fromkeys(name for row in rows for name in row)
    page = pa.RecordBatch.from_pylist([dict.fromkeys(names) | row for row in rows])
    assert unproven(proof(page), quiesced=True).sum() == 1


@pytest.mark.parametrize("event", [0, 1, 2])
def test_no_job_with_an_event_too_few_or_too_many_is_proven(event: int) -> None:
    page = events(2)
    less = page.filter(pa.array([row != event for row in range(len(page))]))
    more = pa.concat_batches([page, page.slice(event, 1)])
    assert unproven(proof(less), quiesced=True).sum() == 1
    assert unproven(proof(more), quiesced=True).sum() == 1


def test_rows_of_jobs_arrive_packed_in_the_part_of_their_key() -> None:
    rows = proof(events(1_000).slice(0, 2_500))
    numbers, blobs = by_part(shrunk(rows), job_keys(rows), 7)
    assert numbers == list(range(7))
    parts = [restored(unpack([blob], ROW)) for blob in blobs]
    assert lined(np.concatenate(parts, axis=1)) == lined(rows)
    for number, part in zip(numbers, parts, strict=True):
        again, _ = by_part(part, job_keys(part), 7)
        assert again == [number]
    assert sum(map(len, blobs)) < rows.nbytes / 2


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=10, max_size=10)))
def test_any_numbers_survive_packing(rows: list[list[int]]) -> None:
    matrix = np.array(rows, np.int64).reshape(-1, len(ROW)).T
    assert lined(restored(unpack([pack(shrunk(matrix))], ROW))) == lined(matrix)


def test_rows_are_joined_as_they_are_merged() -> None:
    page = events(300)
    some = np.random.default_rng(1).permutation(len(page))
    parts = [proof(page.take(pa.array(some[begin::9]))) for begin in range(9)]
    rows = np.concatenate(parts, axis=1)
    assert rows.shape[1] > 300
    assert lined(joined(rows)) == lined(merged(rows)) == lined(proof(page))
    assert lined(joined(proof(page))) == lined(proof(page))


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 60)),
        unique_by=(lambda job: job[1], lambda job: job[2]),
    )
)
def test_lines_are_mixed_if_one_that_came_later_was_claimed_earlier(
    jobs: list[tuple[int, int, int]],
) -> None:
    places = np.array(
        [[line, PRIORITY, at // 8, at, claimed] for line, at, claimed in jobs], np.int64
    ).reshape(-1, len(order.PLACE)).T  # fmt: skip
    # Whole spans, wherever they come from.
    halves = [order.spans(places[:, places[2] % 2 == half]) for half in (1, 0)]
    by_line = [
        [c for ln, _, c in sorted(jobs, key=lambda j: j[1]) if ln == line] for line in (0, 1)
    ]
    is_mixed = any(one > other for line in by_line for one, other in pairwise(line))
    assert order.are_mixed(np.concatenate(halves, axis=1)) == is_mixed


@pytest.mark.parametrize("list_max", [1 << 20, 0])
def test_a_lookup_asks_once_for_each_combination(
    list_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_LIST_MAX", list_max)
    one = pa.array(["a", "b", "a", "a", "b"]).dictionary_encode()
    other = pa.array(["x", "x", "y", "x", "x"]).dictionary_encode()
    asked: list[tuple[str, ...]] = []

    def value(texts: tuple[str, ...]) -> int:
        asked.append(texts)
        return text_hash(texts) >> 1

    found = steps.looked_up([one, other], value)
    assert sorted(asked) == [("a", "x"), ("a", "y"), ("b", "x")]
    pairs = zip(one.to_pylist(), other.to_pylist(), strict=True)
    assert found.tolist() == [text_hash(pair) >> 1 for pair in pairs]


def test_tasks_share_files_so_that_each_row_is_read_once(tmp_path: Path) -> None:
    lake = LakeFiles(str(tmp_path))
    rng = np.random.default_rng(1)
    sizes = [9 * ROWS_IN_GROUP // 2, 100, 200, 300]
    files = [EventFile("2026-11-16", "j", n, n + 1) for n in range(len(sizes))]
    for file, size in zip(files, sizes, strict=True):
        lake.write_table(file.path, pa.table({"pos": rng.integers(0, 2**62, size)}))
    made = plan_reads(lake, files, {"j": 5})
    slices = [file_slice for task in made.tasks for file_slice in task]
    assert len(made.tasks) > 2
    assert {file_slice.after for file_slice in slices} == {5}

    def rows_of(file_slice: FileSlice) -> int:
        pages = lake.pages(
            file_slice.path,
            ["pos", "none"],
            few=[],
            rows=1_000,
            nth=file_slice.nth,
            of=file_slice.of,
        )
        return sum(len(page) for page in pages)

    by_file = {file.path: 0 for file in files}
    for file_slice in slices:
        by_file[file_slice.path] += rows_of(file_slice)
    assert list(by_file.values()) == sizes
