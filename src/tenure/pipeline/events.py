"""Events as a DataFrame: from the lake, a live journal, or a history file.

All three have the same columns. Columns that the history of another system lacks are null, and the
audit says what it could not check for lack of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from tenure.core.errors import NotFound, UsageError
from tenure.core.registry import machines
from tenure.pipeline.lake.files import LakeFiles
from tenure.pipeline.lake.layout import EventFile, event_files
from tenure.pipeline.lake.reach import require_reach
from tenure.pipeline.schema import COLUMNS, DDL, NAMES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def lake_events(
    spark: SparkSession, lake: LakeFiles, files: Sequence[EventFile] | None = None
) -> DataFrame:
    """The events of some files of the lake, or of all of them, with their `day`."""
    chosen = event_files(lake) if files is None else files
    if not chosen:
        return spark.createDataFrame([], f"{DDL}, day string")
    require_reach(spark, lake)
    paths = [lake.uri(file.path) for file in chosen]
    rows = spark.read.schema(DDL).option("basePath", lake.uri("events")).parquet(*paths)
    return filled(rows).withColumn("day", day_of(F.col("ts_ms")))


def journal_events(spark: SparkSession, urls: Sequence[str]) -> DataFrame:
    """The events that live journals hold now."""
    return spark.read.format("tenure").option("urls", "\n".join(urls)).load()


def file_events(spark: SparkSession, path: str) -> DataFrame:
    """A history file: Parquet or JSON lines (by its ending), with any of the journal's columns."""
    suffix = Path(path).suffix
    if "://" not in path and not Path(path).exists():
        raise NotFound(f"there is no history {path}")
    if suffix in (".jsonl", ".json", ".ndjson"):
        return spark.read.schema(DDL).json(path)
    if suffix == ".parquet" or Path(path).is_dir():
        return conformed(spark.read.parquet(path))
    raise UsageError(f"{path}: a history is a .parquet file or folder, or .jsonl, one event a line")


def conformed(rows: DataFrame) -> DataFrame:
    """The journal's columns in their types; those that are not there are null."""
    if not {"job_id", "type"} <= set(rows.columns):
        raise UsageError(
            f"a history needs at least the columns job_id and type; this one has {rows.columns}"
        )
    present = set(rows.columns)
    return rows.select(
        *(
            (F.col(name) if name in present else F.lit(None)).cast(kind).alias(name)
            for name, kind in COLUMNS
        )
    )


def filled(rows: DataFrame) -> DataFrame:
    """Without nulls: an empty value for each column that an older version did not write."""
    return rows.select(
        *(
            F.coalesce(F.col(name), F.lit("" if kind == "string" else 0).cast(kind)).alias(name)
            for name, kind in COLUMNS
        )
    )


def day_of(ts_ms: Column) -> Column:
    """The day of a time, as a text."""
    return F.date_format(F.timestamp_millis(ts_ms), "yyyy-MM-dd")


def in_states(state: Column, kind: str) -> Column:
    """Whether a state is `running`, `final` or `initial` by its contract's table."""
    words = [
        f"{machine.contract}/{word}"
        for machine in machines().values()
        for word in getattr(machine, kind)
    ]
    return F.concat(F.col("contract"), F.lit("/"), state).isin(words)


def positions_after(rows: DataFrame, after: Mapping[str, int]) -> DataFrame:
    """Only the events after these positions of the journals."""
    if not after:
        return rows
    passed = F.create_map(*(F.lit(each) for pair in after.items() for each in pair))
    return rows.where(F.col("pos") > F.coalesce(passed[F.col("journal")], F.lit(0)))


__all__ = [
    "NAMES",
    "conformed",
    "day_of",
    "file_events",
    "filled",
    "in_states",
    "journal_events",
    "lake_events",
    "positions_after",
]
