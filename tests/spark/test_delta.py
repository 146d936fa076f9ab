"""A Delta log beside the lake's files: other engines see every event once, compacted or not."""

from __future__ import annotations

import sys

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from tenure.core.errors import UsageError
from tenure.pipeline.capture import capture
from tenure.pipeline.lake.compact import compact
from tenure.pipeline.lake.delta import keep_log, publish
from tenure.pipeline.lake.files import LakeFiles
from tests.spark.working import lake_rows, work


def in_delta(lake: str) -> list[dict[str, object]]:
    """The table's events as another engine reads them, in the order of the lake."""
    rows = DeltaTable(f"{lake}/events").to_pyarrow_table().to_pylist()
    assert {row.pop("day") for row in rows}
    return sorted(rows, key=lambda row: (row["journal"], row["pos"]))


async def test_a_delta_log_holds_what_the_lake_holds_also_after_compaction(
    spark: SparkSession, lake: str, streams_url: str
) -> None:
    for number in range(3):
        await work(streams_url, 5, prefix=f"d{number}-")
        capture(spark, lake, [streams_url], once=True, parts=1, table_format="delta")
        assert in_delta(lake) == lake_rows(lake)
    files, seen = LakeFiles(lake), []

    def before_removing() -> None:
        publish(files)
        seen.append(in_delta(lake))

    assert compact(files, files_min=2, before_removing=before_removing) > 0
    assert seen == [lake_rows(lake)], "not true while small files and the large one are there"
    assert in_delta(lake) == lake_rows(lake)
    assert not publish(files), "there is nothing to add"
    assert keep_log(files), "it is kept from now on"


def test_without_the_package_the_remedy_is_named(
    lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LakeFiles(lake)
    files.begin()
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(UsageError, match=r"pip install 'tenure\[delta\]'"):
        keep_log(files, "delta")
    assert not keep_log(files), "it was not noted"
    with pytest.raises(UsageError, match="there are parquet and delta"):
        keep_log(files, "orc")
