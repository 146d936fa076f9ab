"""Which folders are lakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenure.core.errors import UsageError
from tenure.pipeline.lake.place import Lake


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
