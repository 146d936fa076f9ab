"""Hourly counts, durations and error rates, by contract, queue, task and worker.

Each attempt and each job counts in the hour in which it ended, each submit in its own hour. So the
figures of a day depend on the rows of that day only. Quantiles are exact: durations are whole
milliseconds with few distinct values. `latency_hourly` has counts by powers of two, which can be
added over any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from tenure.pipeline.events import day_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

HOUR_MS = 3_600_000
BY = ("hour_ms", "contract", "queue", "task", "worker_id")
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
OUTCOMES = {
    "completed": ("complete",),
    "retried": ("retry",),
    "buried": ("bury",),
    "lost": ("reap",),
    "handed_back": ("release", "snooze"),
    "cancelled": ("cancel",),
}
TARGET_MS = 60_000


def metrics_hourly(attempts: DataFrame, jobs: DataFrame, events: DataFrame) -> DataFrame:
    """The figures; from shown attempts and jobs, and events for what was submitted."""
    ended = attempts.where(F.col("ended_ms").isNotNull())
    # An attempt in a SQL contract ends as `fail`; whether its job is buried is decided after it.
    failed = F.when(F.col("error_code") == "cancelled", "cancel").otherwise("bury")
    outcome = F.when(F.col("outcome") == "fail", failed).otherwise(F.col("outcome"))
    by_attempt = ended.groupBy(*_by("ended_ms")).agg(
        F.count("*").alias("attempts"),
        *(_count(outcome.isin(*types), name) for name, types in OUTCOMES.items()),
        *_quantiles("wait_ms"),
        *_quantiles("run_ms"),
        F.sum("run_ms").alias("busy_ms"),
    )
    finished = jobs.where(F.col("ended_ms").isNotNull())
    by_job = finished.groupBy(*_by("ended_ms")).agg(
        F.count("*").alias("jobs"),
        _count(F.col("last.type") == "bury", "dead"),
        *_quantiles("total_ms"),
    )
    submitted = (
        events.where((F.col("type") == "submit") & (F.col("ver") > 0))
        .withColumn("worker_id", F.lit(""))
        .groupBy(*_by("ts_ms"))
        .agg(F.count("*").alias("submitted"))
    )
    joined = by_attempt.join(by_job, list(BY), "full").join(submitted, list(BY), "full")
    return _with_rates(joined)


def _with_rates(rows: DataFrame) -> DataFrame:
    counts = ["submitted", "attempts", *OUTCOMES, "busy_ms", "jobs", "dead"]
    times = [f"{q}_{name}" for name in ("wait_ms", "run_ms", "total_ms") for q in QUANTILES]
    full = rows.select(
        *BY,
        *(F.coalesce(F.col(name), F.lit(0)).cast("bigint").alias(name) for name in counts),
        *times,
    )
    return full.select(
        "*",
        _share("retried", "attempts", "retry_rate"),
        _share("buried", "attempts", "failure_rate"),
        _share("lost", "attempts", "lost_rate"),
        _share("dead", "jobs", "dead_rate"),
        day_of(F.col("hour_ms")).alias("day"),
    )


def latency_hourly(attempts: DataFrame, jobs: DataFrame) -> DataFrame:
    """Histograms of wait, run and total time per hour, with buckets of powers of two ms."""
    ended = attempts.where(F.col("ended_ms").isNotNull())
    parts = [
        _latency(ended, "wait", "wait_ms"),
        _latency(ended, "run", "run_ms"),
        _latency(jobs.where(F.col("ended_ms").isNotNull()), "total", "total_ms"),
    ]
    return parts[0].unionByName(parts[1]).unionByName(parts[2])


def slo(jobs: DataFrame, targets: Mapping[str, int]) -> DataFrame:
    """By day and queue: how many jobs finished, and how many succeeded within the target.

    `targets` maps queue names to milliseconds from submit to end; "" is for all others.
    """
    general = F.lit(targets.get("", TARGET_MS))
    named = [
        each for pair in targets.items() if pair[0] for each in (F.lit(pair[0]), F.lit(pair[1]))
    ]
    target = F.coalesce(F.create_map(*named)[F.col("queue")], general) if named else general
    within = (F.col("total_ms") <= F.col("target_ms")) & (F.col("last.type") == "complete")
    return (
        jobs.where(F.col("total_ms").isNotNull() & (F.col("last.type") != "remove"))
        .withColumn("target_ms", target.cast("bigint"))
        .groupBy("day", "contract", "queue", "target_ms")
        .agg(F.count("*").alias("finished"), _count(within, "within"))
        .select("*", _share("within", "finished", "share"))
    )


def _latency(rows: DataFrame, kind: str, column: str) -> DataFrame:
    bucket = F.floor(F.log2(F.greatest(F.col(column), F.lit(0)) + F.lit(1))).cast("int")
    hour = (F.col("ended_ms") - F.col("ended_ms") % HOUR_MS).alias("hour_ms")
    return (
        rows.where(F.col(column).isNotNull())
        .groupBy(hour, "contract", "queue", F.lit(kind).alias("kind"), bucket.alias("bucket"))
        .agg(F.count("*").alias("count"))
        .select("*", day_of(F.col("hour_ms")).alias("day"))
    )


def _by(ts_ms: str) -> list[Column]:
    hour = F.col(ts_ms) - F.col(ts_ms) % HOUR_MS
    rest = [F.coalesce(F.col(name), F.lit("")).alias(name) for name in BY[1:]]
    return [hour.alias("hour_ms"), *rest]


def _quantiles(column: str) -> list[Column]:
    return [
        F.percentile(F.col(column), share).alias(f"{name}_{column}")
        for name, share in QUANTILES.items()
    ]


def _count(condition: Column, name: str) -> Column:
    return F.sum(F.when(condition, F.lit(1)).otherwise(F.lit(0))).cast("bigint").alias(name)


def _share(part: str, whole: str, name: str) -> Column:
    return F.when(F.col(whole) > 0, F.col(part) / F.col(whole)).alias(name)
