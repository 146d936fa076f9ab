"""Invariants that the proof of a job does not show: order, pause, and the store's clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KEYS = ("line_h", "job_h")
CLOCK_SLACK_MS = 1_000
# A position of a timed journal holds the time above these bits.
PLACE_BITS = 22
_LINE = ("line_h", "priority", "span")


def keyed(events: DataFrame) -> DataFrame:
    """With columns for the hashes that identify jobs in the proof."""
    events = events.withColumn("line_h", F.xxhash64("journal", "contract", "queue"))
    return events.withColumn("job_h", F.xxhash64("job_id"))


def overtaken(proof: DataFrame) -> DataFrame:
    """I22: jobs first claimed before a job of the same line that was submitted earlier."""
    order = Window.partitionBy("line_h", "priority").orderBy("submit_pos")
    before = F.max("claim_pos").over(order.rowsBetween(Window.unboundedPreceding, -1))
    in_line = proof.where("stood").withColumn("priority", F.shiftright("flags", 32))
    return in_line.withColumn("before", before).where("before > claim_pos").select(*KEYS)


def are_mixed(summary: DataFrame) -> bool:
    """Whether jobs were claimed out of order, within a span of a line or between two."""
    spans = (
        summary.where("latest is not null")
        .groupBy(*_LINE)
        .agg(
            F.max("overtakes").alias("overtakes"),
            F.min("earliest").alias("earliest"),
            F.max("latest").alias("latest"),
        )
    )
    order = Window.partitionBy("line_h", "priority").orderBy("span")
    before = F.max("latest").over(order.rowsBetween(Window.unboundedPreceding, -1))
    mixed = spans.withColumn("before", before).where("overtakes or before > earliest")
    return not mixed.isEmpty()


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
