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
from tenure.pipeline.lake.place import Lake
from tenure.pipeline.schema import COLUMNS, DDL, GAPS, NAMES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def lake_events(spark: SparkSession, lake: Lake, where: str = "") -> DataFrame:
    """The events of a lake; those of a condition (`between`) if there is one."""
    lake.require()
    rows = lake.events.read(spark, where)
    return filled(rows if where else rows.where(F.col("journal") != GAPS))


def between(after: Mapping[str, int], upto: Mapping[str, int]) -> str:
    """The condition for events of journals after some positions, up to others."""
    return (
        " or ".join(
            f"(journal = '{journal}' and pos > {after.get(journal, 0):d} and pos <= {position:d})"
            for journal, position in upto.items()
        )
        or "journal = ''"
    )


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


def with_kinds(rows: DataFrame) -> DataFrame:
    """With `from_kind` and `to_kind`: whether a state is waiting, running or final."""
    for kind, state in (("from_kind", "from_state"), ("to_kind", "to_state")):
        running, final = (in_states(F.col(state), each) for each in ("running", "final"))
        word = F.when(running, "running").when(final, "final").otherwise("waiting")
        rows = rows.withColumn(kind, word)
    return rows


__all__ = [
    "NAMES",
    "between",
    "conformed",
    "day_of",
    "file_events",
    "filled",
    "in_states",
    "journal_events",
    "lake_events",
    "with_kinds",
]
