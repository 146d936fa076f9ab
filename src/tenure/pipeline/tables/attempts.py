"""One row per attempt: when it could start, when it did, how it ended.

An attempt is identified by job and fence. An event that returns a job to waiting ends one attempt
and begins the wait of the next, so it counts for two rows. Rows made from parts of a history can be
merged later (`merged`): every column is a maximum or a sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from tenure.pipeline.events import day_of, in_states

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KEYS = ("journal", "contract", "queue", "job_id", "fence")
GREATEST = (
    "task",
    "worker_id",
    "attempt",
    "ready_ms",
    "claimed_ms",
    "ended_ms",
    "outcome",
    "error_code",
    "next_due_ms",
)
SUMS = ("extends", "reports")
COLUMNS = (*KEYS, *GREATEST, *SUMS)
OPEN = "open"


def attempts_of(events: DataFrame) -> DataFrame:
    """The attempts in these events; one that has not begun has no `claimed_ms`."""
    was_running, is_running = (
        in_states(F.col("from_state"), "running"),
        in_states(F.col("to_state"), "running"),
    )
    waits = ~is_running & ~in_states(F.col("to_state"), "final") & (F.col("type") != "remove")
    own, following = F.col("fence"), F.col("fence") + F.lit(1)
    rows = (
        events.where(F.col("ver") > 0)
        .withColumn("ends", was_running & ~is_running)
        .withColumn("waits", waits)
        .withColumn(
            "row", F.explode(F.when(waits, F.array(own, following)).otherwise(F.array(own)))
        )
        .withColumn("mine", F.col("row") == F.col("fence"))
        .where(F.col("row") > 0)
    )
    claims, ends = F.col("mine") & (F.col("type") == "claim"), F.col("mine") & F.col("ends")
    begins = ~F.col("mine") & F.col("waits")
    ready = F.greatest(F.col("ts_ms"), F.col("due_ms"))
    return rows.groupBy(*KEYS[:-1], F.col("row").alias("fence")).agg(
        F.max("task").alias("task"),
        _where(claims, "worker_id"),
        _where(claims, "attempt"),
        F.max(F.when(begins, ready)).alias("ready_ms"),
        _where(claims, "ts_ms", "claimed_ms"),
        _where(ends, "ts_ms", "ended_ms"),
        _where(ends, "type", "outcome"),
        _where(ends, "error_code"),
        F.max(F.when(ends & F.col("waits"), ready)).alias("next_due_ms"),
        _count(F.col("mine") & (F.col("type") == "extend"), "extends"),
        _count(F.col("mine") & (F.col("type") == "report"), "reports"),
    )


def merged(parts: DataFrame) -> DataFrame:
    """Rows of the same attempt from several parts of the history, as one."""
    return parts.groupBy(*KEYS).agg(
        *(F.max(name).alias(name) for name in GREATEST), *(F.sum(name).alias(name) for name in SUMS)
    )


def shown(attempts: DataFrame) -> DataFrame:
    """With the durations, and the day on which the attempt ended ("open" while it has not)."""
    # Events after the end of an attempt (its job is sent back, or removed) make no row.
    begun = attempts.where(F.col("ready_ms").isNotNull() | F.col("claimed_ms").isNotNull())
    return begun.select(
        *COLUMNS,
        (F.col("claimed_ms") - F.col("ready_ms")).alias("wait_ms"),
        (F.col("ended_ms") - F.col("claimed_ms")).alias("run_ms"),
        (F.col("next_due_ms") - F.col("ended_ms")).alias("backoff_ms"),
        F.coalesce(day_of(F.col("ended_ms")), F.lit(OPEN)).alias("day"),
    )


def _where(condition: Column, column: str, name: str = "") -> Column:
    return F.max(F.when(condition, F.col(column))).alias(name or column)


def _count(condition: Column, name: str) -> Column:
    return F.sum(F.when(condition, F.lit(1)).otherwise(F.lit(0))).cast("bigint").alias(name)
