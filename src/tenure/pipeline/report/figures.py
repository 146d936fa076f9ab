"""The figures of the report, and what to page about, from the tables of a lake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812

from tenure.core.errors import NotFound
from tenure.pipeline.audit import lakes
from tenure.pipeline.audit.explain import UNOBSERVED
from tenure.pipeline.audit.lakes import read_state
from tenure.pipeline.audit.run import Audited
from tenure.pipeline.lake import Lake
from tenure.pipeline.source.offsets import Gap

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
    lake = Lake(lake_path)
    lake.require()
    metrics, jobs = lake.read(spark, "metrics_hourly"), lake.read(spark, "jobs")
    journals = lake.journals()
    finished = jobs.where("is_final")
    dead = finished.where("last_type = 'bury'")
    return Figures(
        lake=lake_path,
        events=sum(journals.values()),
        journals=len(journals),
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
            lake.read(spark, "latency_hourly")
            .groupBy("hour_ms", "kind", "bucket")
            .agg(F.sum("count").alias("count"))
            .orderBy("hour_ms")
        ),
        causes=_rows(
            dead.groupBy("contract", "queue", "error_code")
            .count().orderBy(F.desc("count")).limit(_TOP)
        ),
        tasks=_rows(_slowest(lake.read(spark, "attempts"))),
        workers=_rows(_busy(lake.read(spark, "attempts"))),
        slo=_rows(lake.read(spark, "slo").orderBy("day", "contract", "queue")),
        audit=lakes.read_state(lake).total,
        violations=_violations(spark, lake),
        gaps=lake.gaps(),
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


def _violations(spark: SparkSession, lake: Lake) -> list[dict[str, Any]]:
    found = lakes.violations(spark, lake)
    if found is None:
        return []
    return _rows(found.where(F.col("invariant") != UNOBSERVED).limit(_VIOLATIONS_SHOWN))


def _rows(frame: DataFrame) -> list[dict[str, Any]]:
    return [row.asDict(recursive=True) for row in frame.collect()]


def alerts(lake: Lake, shares: Mapping[str, float]) -> list[str]:
    """One line for each service level that was missed on the newest day, and each broken promise.

    `shares` maps queues to the share of jobs that must have ended well within the target; "" is for
    all others.
    """
    lake.require()
    return [*_levels(lake, shares), *_promises(lake)]


def _levels(lake: Lake, shares: Mapping[str, float]) -> Iterator[str]:
    table = lake.table("slo")
    if table.opened() is None:
        raise NotFound(
            f"there is no table 'slo' in {lake.name}; "
            f"`tenure pipeline tables --lake {lake.name}` makes it"
        )
    newest = max(table.parts(), default="")
    for row in table.rows(pc.field("day") == newest) if newest else []:
        wanted = shares.get(row["queue"], shares.get("", 0.0))
        if row["share"] < wanted:
            yield (
                f"{row['contract']} {row['queue']}: {row['share']:.1%} of {row['finished']:,} jobs "
                f"ended well within {row['target_ms'] / 1000:g} s on {newest}; wanted {wanted:.1%}"
            )


def _promises(lake: Lake) -> Iterator[str]:
    total = read_state(lake).total
    for verdict in total.verdicts if total else ():
        if verdict.violations:
            yield f"{verdict.invariant} was broken {verdict.violations:,} times: {verdict.text}"
