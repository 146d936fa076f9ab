"""What the proof leaves open: jobs in doubt, event by event, and invariants over several jobs.

`explain` gets only the events of jobs that were not proven, sorted by job and position, and gives
them to the checker of `core.journal`. The result names the broken invariant and shows the events.
A job that is correct after all gives no row, or one that says how many steps of other programs left
no event. After it come the order of claims (I22), pauses (I24), deliveries (I28), and the store's
clock (I35).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from tenure.core.journal import HistoryChecker, JournalEvent, Violation
from tenure.pipeline.audit.rules import FOREIGN, MACHINES
from tenure.pipeline.schema import NAMES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


VIOLATIONS_DDL = (
    "invariant string, journal string, contract string, queue string, job_id string, "
    "text string, evidence string"
)
VIOLATIONS = pa.schema(
    [pa.field(part.split()[0], pa.string()) for part in VIOLATIONS_DDL.split(", ")]
)
UNOBSERVED = "unobserved"
_FIELDS = JournalEvent.__struct_fields__
_PER_BATCH = 1_000


def explain(events: DataFrame, *, quiesced: bool) -> DataFrame:
    """Violations in these events, which have a column `whole` and are those of whole jobs."""

    def judge(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _in_batches(_judged(batches, quiesced))

    ordered = events.select(*NAMES, "whole").repartition("journal", "job_id")
    ordered = ordered.sortWithinPartitions("journal", "contract", "queue", "job_id", "pos", "ver")
    return ordered.mapInArrow(judge, VIOLATIONS_DDL)


def _judged(batches: Iterator[pa.RecordBatch], quiesced: bool) -> Iterator[dict[str, Any]]:
    rows = (row for batch in batches for row in batch.to_pylist())
    for key, group in groupby(
        rows, key=lambda r: (r["journal"], r["contract"], r["queue"], r["job_id"])
    ):
        yield from _of_job(key, list(group), quiesced)


def _of_job(
    key: tuple[str, ...], rows: list[dict[str, Any]], quiesced: bool
) -> Iterator[dict[str, Any]]:
    journal, contract, queue, job_id = key
    named = {"journal": journal, "contract": contract, "queue": queue, "job_id": job_id}
    if contract not in MACHINES:
        yield named | _row(UNOBSERVED, f"no contract {contract!r} is known here", [])
        return
    checker = HistoryChecker(
        MACHINES[contract], whole=rows[0]["whole"], foreign=contract in FOREIGN
    )
    for index, row in enumerate(rows):
        checker.add(index, _event(row))
    checker.finish(quiesced=quiesced)
    for violation in checker.violations:
        yield named | _row(violation.invariant, violation.text, evidence_of(violation))
    steps = checker.unobserved[job_id]
    if steps and not checker.violations:
        yield named | _row(UNOBSERVED, f"{steps} steps of others left no event", [])


def _row(invariant: str, text: str, evidence: list[Any]) -> dict[str, Any]:
    return {
        "invariant": invariant,
        "text": text,
        "evidence": msgspec.json.encode(evidence).decode(),
    }


def evidence_of(violation: Violation) -> list[Any]:
    """The events of a violation as plain objects."""
    return [msgspec.to_builtins(event) for event in violation.evidence]


def _event(row: dict[str, Any]) -> JournalEvent:
    return JournalEvent(**{name: row[name] for name in _FIELDS if row[name] is not None})


def _in_batches(rows: Iterator[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    waiting: list[dict[str, Any]] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) == _PER_BATCH:
            yield pa.RecordBatch.from_pylist(waiting, VIOLATIONS)
            waiting = []
    if waiting:
        yield pa.RecordBatch.from_pylist(waiting, VIOLATIONS)


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


NOT_HERE = "no journal of an outbox is here"
_OUTBOX = "/outbox"


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
