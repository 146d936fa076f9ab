"""Checks in the journals of outboxes that no receiver gets an older event after a newer one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from tenure.core.registry import parse_url
from tenure.pipeline.audit.lines import violations_of
from tenure.pipeline.lake.files import LakeFiles
from tenure.pipeline.lake.progress import all_progress
from tenure.pipeline.source.offsets import epoch_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

NOT_HERE = "no journal of an outbox is here"
_OUTBOX = "/outbox"


def outbox_journals(lake: LakeFiles) -> set[str]:
    """The journals of a lake that are those of outboxes."""
    return {
        epoch_name(each.journal, each.epoch) for each in all_progress(lake) if _is_one(each.url)
    }


def _is_one(url: str) -> bool:
    return "://" in url and parse_url(url).options.get("box") == "outbox"


def outbox_events(events: DataFrame) -> DataFrame | None:
    """The events of outboxes among others; None if there are none."""
    some = events.where(F.col("queue").endswith(_OUTBOX))
    return None if some.isEmpty() else some


def gone_back(events: DataFrame, after: Mapping[str, int]) -> DataFrame:
    """I28: deliveries made after that of a later event of the same job.

    Only those after the given position of each journal. The id of an event is the id of its job, a
    dot and a number. Events that were sent again on request do not count: the receiver sees by the
    number that they are old.
    """
    deliveries = events.where(
        F.col("queue").endswith(_OUTBOX)
        & F.col("type").isin("complete", "reopen")
        & F.col("job_id").startswith(F.concat(F.col("gid"), F.lit(".")))
    ).withColumn("number", F.expr("try_cast(substring(job_id, length(gid) + 2) as int)"))
    is_delivered = F.col("type") == "complete"
    before = Window.partitionBy("journal", "queue", "gid").orderBy("pos")
    latest = F.max(F.when(is_delivered, F.col("number"))).over(
        before.rowsBetween(Window.unboundedPreceding, -1)
    )
    again = F.max(F.col("type") == "reopen").over(Window.partitionBy("journal", "queue", "job_id"))
    found = deliveries.withColumns({"latest": latest, "again": again}).where(
        is_delivered & ~F.col("again") & (F.col("latest") > F.col("number")) & _is_new(after)
    )
    number = F.col("latest").cast("string")
    text = F.concat(F.lit("delivered after event "), number, F.lit(" of the same job"))
    return violations_of(found, "I28", text)


def _is_new(after: Mapping[str, int]) -> Column:
    old = F.lit(False)
    for journal, position in after.items():
        old = old | ((F.col("journal") == journal) & (F.col("pos") <= position))
    return ~old
