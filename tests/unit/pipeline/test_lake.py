"""Which folders are lakes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tenure.core.errors import UsageError
from tenure.pipeline.delta_rs import DeltaReader
from tenure.pipeline.lake import Lake


@pytest.fixture
def old(tmp_path: Path) -> Path:
    (tmp_path / "lake.json").write_text('{"tenure": "lake", "schema": 3}')
    (tmp_path / "events" / "day=2026-11-01").mkdir(parents=True)
    return tmp_path


def test_a_lake_of_plain_files_is_not_captured_into_because_its_files_would_be_strays(
    old: Path,
) -> None:
    with pytest.raises(UsageError, match=r"older version.*tenure pipeline audit"):
        Lake(str(old)).begin()
    assert not (old / "events" / "_delta_log").exists()


def test_a_lake_of_plain_files_is_not_read_as_an_empty_one(old: Path) -> None:
    with pytest.raises(UsageError, match="older version"):
        Lake(str(old)).require()


def test_a_lake_may_be_named_by_a_file_url(tmp_path: Path) -> None:
    Lake(f"file://{tmp_path}/lake").begin()
    Lake(f"{tmp_path}/lake").require()


def test_the_source_in_python_reads_a_table_on_a_disk_too(tmp_path: Path) -> None:
    table = Lake(str(tmp_path / "lake")).table("slo")
    rows = pa.table({"queue": ["a", "b"], "day": ["2026-11-17", "2026-11-18"]})
    table.create(rows.schema, "day")
    table.put(rows, "day")
    reader = DeltaReader(table.options)
    found = [
        row for part in reader.partitions() for batch in reader.read(part)
        for row in batch.to_pylist()
    ]  # fmt: skip
    assert sorted(row["queue"] for row in found) == ["a", "b"]
