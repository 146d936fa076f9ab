"""Invariants over several jobs: first in, first out; and no claims during a pause."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from tenure.pipeline.audit.invariants import IN_LINE, TIMED
from tenure.pipeline.audit.order import bits_of
from tenure.pipeline.audit.proof import (
    CLOCK_SLACK_MS,
    KEYS,
    NEVER,
    PLACE_BITS,
    PRIORITY_AT,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.window import WindowSpec

# A line (the jobs of a queue with one priority) is split into slices of 64 ms, or of 64 positions
# if positions hold no time. Each slice is sorted by itself.
_SLICE_BITS = 6
_LINE = ("line_h", "priority", "slice")


def has(flag: int) -> Column:
    """Whether a row of the proof has an event of such a kind."""
    return F.col("flags").bitwiseAND(F.lit(flag)) != 0


def keyed(events: DataFrame) -> DataFrame:
    """With columns for the hashes that identify jobs in the proof."""
    # Spark skips nulls; the proof treats them as empty strings.
    line = [F.coalesce(name, F.lit("")) for name in ("journal", "contract", "queue")]
    events = events.withColumn("line_h", F.xxhash64(*line))
    return events.withColumn("job_h", F.xxhash64(F.coalesce("job_id", F.lit(""))))


def overtaken(proofs: DataFrame) -> DataFrame:
    """I22: jobs first claimed before a job of the same line that was submitted earlier.

    It sorts the rows of the proof, one per job, not the events. Each slice of a line is sorted by
    itself; of all earlier slices only the latest claim matters.
    """
    in_line = _placed(proofs)
    slices = Window.partitionBy("line_h", "priority").orderBy("slice")
    earlier = (
        in_line.groupBy(*_LINE)
        .agg(F.max("claim_pos").alias("latest"))
        .withColumn("before", F.max("latest").over(_all_before(slices)))
        .select(*_LINE, "before")
    )
    within = Window.partitionBy(*_LINE).orderBy("submit_pos")
    return (
        in_line.withColumn("latest", F.max("claim_pos").over(_all_before(within)))
        .join(earlier, list(_LINE))
        .where(F.greatest("latest", "before") > F.col("claim_pos"))
        .select(*KEYS)
    )


def _placed(proofs: DataFrame) -> DataFrame:
    at = F.col("submit_pos")
    timed = F.shiftright(at, PLACE_BITS + _SLICE_BITS)
    is_timed = has(bits_of(name for name in IN_LINE if name in TIMED))
    stood = (at < NEVER) & (F.col("claim_pos") < NEVER)
    return proofs.where(stood & has(bits_of(IN_LINE))).select(
        *KEYS,
        F.shiftright("flags", PRIORITY_AT).alias("priority"),
        F.when(is_timed, timed).otherwise(F.shiftright(at, _SLICE_BITS)).alias("slice"),
        "submit_pos",
        "claim_pos",
    )


def _all_before(order: WindowSpec) -> WindowSpec:
    return order.rowsBetween(Window.unboundedPreceding, -1)


def explain_overtaken(events: DataFrame, found: DataFrame) -> DataFrame:
    """The first claims of such jobs, in words, with the event."""
    claims = keyed(events.where((F.col("type") == "claim") & (F.col("fence") == 1)))
    text = F.lit("claimed before a job of the same line that was submitted earlier")
    return violations_of(claims.join(F.broadcast(found), list(KEYS)), "I22", text)


def claimed_while_paused(events: DataFrame) -> DataFrame:
    """I24: claims between a pause and the next resume of the same queue."""
    signs = events.where(F.col("type").isin("pause", "resume")).select(
        "journal", "contract", "queue", "type", F.col("pos").alias("from_pos")
    )
    following = Window.partitionBy("journal", "contract", "queue").orderBy("from_pos")
    # A repeated pause changes nothing; the next resume ends both.
    resumes = F.min(F.when(F.col("type") == "resume", F.col("from_pos"))).over(
        following.rowsBetween(1, Window.unboundedFollowing)
    )
    pauses = (
        signs.withColumn("upto_pos", F.coalesce(resumes, F.lit(2**63 - 1)))
        .where(F.col("type") == "pause")
        .drop("type")
        .groupBy("journal", "contract", "queue", "upto_pos")
        .agg(F.min("from_pos").alias("from_pos"))
    )
    claims = events.where((F.col("type") == "claim") & (F.col("ver") > 0))
    inside = (F.col("pos") > F.col("from_pos")) & (F.col("pos") < F.col("upto_pos"))
    joined = claims.join(F.broadcast(pauses), ["journal", "contract", "queue"]).where(inside)
    return violations_of(joined, "I24", F.lit("claimed while the queue was paused"))


def late_clock(events: DataFrame) -> DataFrame:
    """I35: events whose time is well before the time in their position."""
    behind = (F.shiftright("pos", PLACE_BITS) - F.col("ts_ms")).cast("string")
    text = F.concat(F.lit("the store's clock was "), behind, F.lit(" ms behind its own history"))
    return violations_of(events, "I35", text)


def is_behind() -> Column:
    """Whether the time of an event is well before the time in its position."""
    return F.shiftright("pos", PLACE_BITS) - F.col("ts_ms") > CLOCK_SLACK_MS


def violations_of(rows: DataFrame, number: str, text: Column) -> DataFrame:
    """Rows of events as rows of what was found, each with its event for evidence."""
    event = F.struct("seq", "type", "ver", "from_state", "to_state", "fence", "ts_ms", "worker_id")
    return rows.select(
        F.lit(number).alias("invariant"),
        "journal",
        "contract",
        "queue",
        "job_id",
        text.alias("text"),
        F.to_json(F.array(event)).alias("evidence"),
    )
