"""One row per job: its state, how often it started, how long it took.

`last` holds values of the latest event, found by the greatest `ver`. So rows made from parts of a
history can be merged in any order (`merged`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from tenure.pipeline.events import day_of, in_states

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KEYS = ("journal", "contract", "queue", "job_id")
LEAST = ("first_ver", "submitted_ms", "first_claimed_ms")
GREATEST = ("task", "due_ms", "priority", "gid", "max_attempts", "last")
SUMS = ("starts", "completions", "retries", "lost", "releases", "epochs")
OPEN = "open"


def jobs_of(events: DataFrame) -> DataFrame:
    """The jobs in these events."""
    kind = F.col("type")
    last = F.struct(
        F.col("ver"),
        F.col("to_state").alias("state"),
        F.col("ts_ms"),
        kind,
        F.col("error_code"),
        F.col("worker_id"),
        F.col("attempt"),
        F.col("fence"),
    )
    return (
        events.where(F.col("ver") > 0)
        .groupBy(*KEYS)
        .agg(
            F.min("ver").alias("first_ver"),
            F.min(F.when(kind == "submit", F.col("ts_ms"))).alias("submitted_ms"),
            F.min(F.when(kind == "claim", F.col("ts_ms"))).alias("first_claimed_ms"),
            F.max("task").alias("task"),
            F.max(F.when(kind == "submit", F.col("due_ms"))).alias("due_ms"),
            F.max("priority").alias("priority"),
            F.max("gid").alias("gid"),
            F.max("max_attempts").alias("max_attempts"),
            F.max(last).alias("last"),
            _count(kind == "claim", "starts"),
            _count(kind == "complete", "completions"),
            _count(kind == "retry", "retries"),
            _count(kind == "reap", "lost"),
            _count(kind.isin("release", "snooze"), "releases"),
            _count(kind.isin("submit", "reopen"), "epochs"),
        )
    )


def merged(parts: DataFrame) -> DataFrame:
    """Rows of the same job from several parts of the history, as one."""
    return parts.groupBy(*KEYS).agg(
        *(F.min(name).alias(name) for name in LEAST),
        *(F.max(name).alias(name) for name in GREATEST),
        *(F.sum(name).alias(name) for name in SUMS),
    )


def shown(jobs: DataFrame) -> DataFrame:
    """With the state, the durations, and the day on which it ended ("open": not yet)."""
    last = F.col("last")
    is_final = in_states(last["state"], "final") | (last["type"] == "remove")
    began = F.greatest(F.col("submitted_ms"), F.col("due_ms"))
    ended = F.when(is_final, last["ts_ms"])
    return jobs.select(
        *KEYS,
        *LEAST,
        *GREATEST,
        *SUMS,
        F.when(last["type"] == "remove", F.lit("removed")).otherwise(last["state"]).alias("state"),
        is_final.alias("is_final"),
        last["error_code"].alias("error_code"),
        last["worker_id"].alias("worker_id"),
        last["attempt"].alias("attempt"),
        last["fence"].alias("fence"),
        ended.alias("ended_ms"),
        (F.col("first_claimed_ms") - began).alias("wait_ms"),
        (ended - F.col("submitted_ms")).alias("total_ms"),
        F.coalesce(day_of(ended), F.lit(OPEN)).alias("day"),
    )


def is_dead(jobs: DataFrame) -> Column:
    """Jobs that ended in failure: the dead letters, whatever a contract calls them."""
    return F.col("is_final") & F.col("last.type").isin("bury", "expire")


def _count(condition: Column, name: str) -> Column:
    return F.sum(F.when(condition, F.lit(1)).otherwise(F.lit(0))).cast("bigint").alias(name)
