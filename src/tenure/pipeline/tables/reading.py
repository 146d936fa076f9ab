"""Reads tables of the lake. Their columns are known without opening a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tenure.core.errors import NotFound
from tenure.pipeline.events import lake_events
from tenure.pipeline.lake.files import LakeFiles
from tenure.pipeline.lake.reach import require_reach
from tenure.pipeline.tables import attempts, jobs
from tenure.pipeline.tables.manifest import TABLES, read_manifest
from tenure.pipeline.tables.metrics import latency_hourly, metrics_hourly, slo

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_SCHEMAS: dict[str, StructType] = {}


def table(spark: SparkSession, lake: LakeFiles, name: str) -> DataFrame:
    """A table by its name; `events` is there before any run."""
    if name == "events":
        return lake_events(spark, lake)
    paths = read_manifest(lake).of(name)
    if not paths:
        raise NotFound(
            f"there is no table {name!r} in {lake.lake}; "
            f"`tenure pipeline tables --lake {lake.lake}` makes them"
        )
    return read(spark, lake, name, paths)


def read(spark: SparkSession, lake: LakeFiles, name: str, paths: list[str]) -> DataFrame:
    """Some files of a table with their `day`, or none: then an empty table."""
    if name not in _SCHEMAS:
        _SCHEMAS[name] = _empty(spark, lake, name).schema
    if not paths:
        return spark.createDataFrame([], _SCHEMAS[name])
    require_reach(spark, lake)
    # With a schema, Spark does not open files to infer one, nor turn the days into dates.
    return (
        spark.read.schema(_SCHEMAS[name])
        .option("basePath", lake.uri(f"{TABLES}/{name}"))
        .parquet(*(lake.uri(path) for path in paths))
    )


def learn(name: str, rows: DataFrame) -> None:
    """Take the columns of a table from rows that are about to be written into it."""
    _SCHEMAS[name] = rows.schema


def _empty(spark: SparkSession, lake: LakeFiles, name: str) -> DataFrame:
    """The table made from no events, for its schema."""
    events = lake_events(spark, lake, [])
    done = attempts.shown(attempts.attempts_of(events))
    ended = jobs.shown(jobs.jobs_of(events))
    match name:
        case "attempts":
            return done
        case "jobs":
            return ended
        case "metrics_hourly":
            return metrics_hourly(done, ended, events)
        case "latency_hourly":
            return latency_hourly(done, ended)
        case _:
            return slo(ended, {})
