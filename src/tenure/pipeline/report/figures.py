"""The figures of the report as small lists; Spark does the aggregation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as F  # noqa: N812

from tenure.pipeline.audit import lakes
from tenure.pipeline.audit.explain import UNOBSERVED
from tenure.pipeline.audit.run import Audited
from tenure.pipeline.lake.files import LakeFiles
from tenure.pipeline.lake.progress import all_progress, gaps
from tenure.pipeline.source.offsets import Gap
from tenure.pipeline.tables.reading import table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TOP = 15
_VIOLATIONS_SHOWN = 50


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on the page. Rows are plain objects with the columns of their chart."""

    lake: str
    events: int
    journals: int
    jobs: int
    dead: int
    by_hour: list[dict[str, Any]]
    latency: list[dict[str, Any]]
    causes: list[dict[str, Any]]
    tasks: list[dict[str, Any]]
    workers: list[dict[str, Any]]
    slo: list[dict[str, Any]]
    audit: Audited | None
    violations: list[dict[str, Any]]
    gaps: list[Gap]


def figures_of(spark: SparkSession, lake_path: str) -> Figures:
    """Read the tables of a lake."""
    lake = LakeFiles(lake_path)
    lake.require()
    metrics, jobs = table(spark, lake, "metrics_hourly"), table(spark, lake, "jobs")
    progress = all_progress(lake)
    finished = jobs.where("is_final")
    dead = finished.where("last.type = 'bury'")
    return Figures(
        lake=lake_path,
        events=sum(each.rows for each in progress),
        journals=len(progress),
        jobs=jobs.count(),
        dead=dead.count(),
        by_hour=_rows(
            metrics.groupBy("hour_ms", "contract", "queue").agg(
                F.sum("submitted").alias("submitted"),
                F.sum("completed").alias("completed"),
                F.sum("buried").alias("failed"),
                F.sum("lost").alias("lost"),
            ).orderBy("hour_ms")
        ),
        latency=_rows(
            table(spark, lake, "latency_hourly")
            .groupBy("hour_ms", "kind", "bucket")
            .agg(F.sum("count").alias("count"))
            .orderBy("hour_ms")
        ),
        causes=_rows(
            dead.groupBy("contract", "queue", "error_code")
            .count().orderBy(F.desc("count")).limit(_TOP)
        ),
        tasks=_rows(_slowest(table(spark, lake, "attempts"))),
        workers=_rows(_busy(table(spark, lake, "attempts"))),
        slo=_rows(table(spark, lake, "slo").orderBy("day", "contract", "queue")),
        audit=lakes.read_state(lake).total,
        violations=_violations(spark, lake),
        gaps=gaps(lake),
    )  # fmt: skip


def _slowest(attempts: DataFrame) -> DataFrame:
    ended = attempts.where("ended_ms is not null and run_ms is not null")
    return (
        ended.groupBy("contract", "queue", "task")
        .agg(
            F.count("*").alias("attempts"),
            F.percentile("run_ms", 0.5).alias("p50"),
            F.percentile("run_ms", 0.95).alias("p95"),
            F.percentile("run_ms", 0.99).alias("p99"),
        )
        .orderBy(F.desc("p95"))
        .limit(_TOP)
    )


def _busy(attempts: DataFrame) -> DataFrame:
    """How many slots of each worker were busy on average while it was seen."""
    ended = attempts.where("ended_ms is not null and claimed_ms is not null")
    span = F.greatest(F.max("ended_ms") - F.min("claimed_ms"), F.lit(1))
    return (
        ended.groupBy("worker_id")
        .agg(
            F.count("*").alias("attempts"),
            F.sum("run_ms").alias("busy_ms"),
            (F.sum("run_ms") / span).alias("slots"),
            F.sum((F.col("outcome") == "reap").cast("int")).alias("lost"),
        )
        .orderBy(F.desc("attempts"))
        .limit(_TOP)
    )


def _violations(spark: SparkSession, lake: LakeFiles) -> list[dict[str, Any]]:
    found = lakes.violations(spark, lake)
    if found is None:
        return []
    return _rows(found.where(F.col("invariant") != UNOBSERVED).limit(_VIOLATIONS_SHOWN))


def _rows(frame: DataFrame) -> list[dict[str, Any]]:
    return [row.asDict(recursive=True) for row in frame.collect()]
