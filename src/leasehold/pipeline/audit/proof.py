"""The proof: one row a job, by aggregates that need no order and add up in any way.

Every event says what its writer saw and what it left. The exclusive-or over all of a job's events
of both hashes leaves, if the chain is whole, only what the last one left: each other hash stands
there twice, and the first saw nothing. So an unbroken chain is proven, up to one chance in 2**38,
without sorting, and rows of parts of the history merge into the row of the whole. What concerns one
event alone is an ordinary condition.

A row is ten numbers, for it is all that is shuffled: jobs go by a hash of their id, and what
belongs to the last event is packed behind that event's number, so that one maximum finds both.
A job that is not proven is not yet guilty: it is looked at closely (`explain`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from leasehold.pipeline.audit import steps as step
from leasehold.pipeline.audit.invariants import TIMED
from leasehold.pipeline.audit.steps import CONTRACTS, FINAL, Steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame

KEYS = ("line_h", "job_h")
ROW = (*KEYS, "n", "hi", "x", "max_pos", "last_pos", "flags", "submit_pos", "claim_pos")
BAD, LATE_CLOCK, PAUSES, EXPIRED, CUT, STRANGE = 1, 2, 4, 8, 16, 32
KNOWN_AT, PRIORITY_AT = 8, 32
CLOCK_SLACK_MS = 1_000
PLACE_BITS = 22
# A place behind all others: nothing of the kind happened.
NEVER = 2**63 - 1

# Packed numbers: the event's number, then two bits for what it left, then part of a hash.
_VER_AT, _KIND_AT, _VER_MAX = 40, 38, 1 << 22
_REST, _HASH = (1 << _VER_AT) - 1, (1 << _KIND_AT) - 1

_NEEDED = (
    *("journal", "pos", "contract", "queue", "job_id", "type", "ts_ms", "ver", "attempt"),
    *("fence", "prev_fence", "token_h", "worker_id", "lease_until_ms", "prev_lease_until_ms"),
    *("priority", "due_ms", "max_attempts"),
)


def job_keys() -> dict[str, Column]:
    """By what a job goes in the proof.

    Two jobs that share a hash are not proven together, and told apart when they are looked at.
    """
    return {
        "line_h": F.xxhash64("journal", "contract", "queue"),
        "job_h": F.xxhash64("job_id"),
    }


def proof(events: DataFrame, steps: Steps, *, cut: Sequence[str] = ()) -> DataFrame:
    """One row a job, for these events; `cut` names the journals whose beginning is missing."""
    is_step = F.col("ver") > 0
    # Every event has a number here, also one that is no step: so nothing is null on the hot path.
    number = F.shiftleft(F.col("ver").cast("bigint").bitwiseAND(F.lit(_VER_MAX - 1)), _VER_AT)
    rows = _marked(events, steps, cut).withColumn("number", number)
    left, saw = F.col("left"), F.col("saw")
    last = F.col("number").bitwiseOR(left.bitwiseAND(F.lit(_HASH)))
    last = last.bitwiseOR(F.shiftleft(F.col("kind").cast("bigint"), _KIND_AT))
    return rows.groupBy(*KEYS).agg(
        F.sum(is_step.cast("int")).alias("n"),
        F.max(last).alias("hi"),
        F.bit_xor(F.when(is_step, left.bitwiseXOR(saw)).otherwise(F.lit(0))).alias("x"),
        F.max(F.when(is_step, F.col("pos")).otherwise(F.lit(0))).alias("max_pos"),
        F.max(F.col("number").bitwiseOR(F.col("pos").bitwiseAND(F.lit(_REST)))).alias("last_pos"),
        F.bit_or("flags").alias("flags"),
        F.min("submitted").alias("submit_pos"),
        F.min("claimed").alias("claim_pos"),
    )


def _marked(events: DataFrame, steps: Steps, cut: Sequence[str]) -> DataFrame:
    """What each event says, in numbers."""
    known = (
        events.select(*_NEEDED, step.step_hash().alias("step"))
        .where(F.col("ver").isNotNull())
        .join(F.broadcast(steps.table), "step", "left")
        .withColumn("info", F.coalesce("info", F.lit(0)))
        .withColumn("who", F.xxhash64("worker_id", "token_h"))
    )
    in_line = step.has(step.SUBMITS) & (F.col("due_ms") == 0)
    return known.select(
        *(column.alias(name) for name, column in job_keys().items()),
        *("ver", "pos", _flags(cut).alias("flags"), _left().alias("left"), _saw().alias("saw")),
        step.kind().alias("kind"),
        F.when(in_line, F.col("pos")).otherwise(F.lit(NEVER)).alias("submitted"),
        F.when(step.has(step.CLAIMS), F.col("pos")).otherwise(F.lit(NEVER)).alias("claimed"),
    )


def merged(parts: DataFrame) -> DataFrame:
    """Rows of parts of the history as rows of the whole."""
    folds = {"n": F.sum, "hi": F.max, "x": F.bit_xor, "max_pos": F.max}
    folds |= {"last_pos": F.max, "flags": F.bit_or, "submit_pos": F.min, "claim_pos": F.min}
    return parts.groupBy(*KEYS).agg(*(fold(name).alias(name) for name, fold in folds.items()))


def unproven(*, quiesced: bool) -> Column:
    """Whether a job's row leaves anything open."""
    ends = F.col("hi").bitwiseXOR(F.col("x")).bitwiseAND(F.lit(_HASH))
    misplaced = F.col("last_pos").bitwiseXOR(F.col("max_pos")).bitwiseAND(F.lit(_REST))
    is_broken = begins_late() | (ends != 0) | (misplaced != 0)
    if quiesced:
        is_broken = is_broken | (~has_ended())
    return ((F.col("n") != 0) & F.coalesce(is_broken, F.lit(True))) | has(BAD)


def has_ended() -> Column:
    """Whether a job's last step left it finished, removed or expired."""
    kind = F.shiftright("hi", _KIND_AT).bitwiseAND(F.lit(3))
    return (kind >= FINAL) | has(EXPIRED)


def has(flag: int) -> Column:
    """Whether an event of the job is such a one."""
    return F.col("flags").bitwiseAND(F.lit(flag)) != 0


def begins_late() -> Column:
    """Whether some events of a job, as a rule its first ones, are not there."""
    return F.col("n") != F.shiftright("hi", _VER_AT)


def contract_code() -> Column:
    """The number of the job's contract, -1 for one that is not known."""
    code = F.lit(-1)
    for number in range(len(CONTRACTS)):
        code = F.when(has(1 << (KNOWN_AT + number)), F.lit(number)).otherwise(code)
    return code


def priority() -> Column:
    """With which priority it was submitted."""
    return F.shiftright("flags", PRIORITY_AT)


def _left() -> Column:
    """What an event left behind, with its number."""
    return F.xxhash64(
        F.col("ver"),
        step.becomes(),
        F.col("fence"),
        F.col("lease_until_ms"),
        F.when(step.has(step.TO_FINAL), F.lit(-1)).otherwise(F.col("attempt")),
        F.when(step.has(step.TO_RUNNING), F.col("who")).otherwise(F.lit(0)),
    )


def _saw() -> Column:
    """What its writer found, in the same words; nothing before the first."""
    before = (
        F.when(step.has(step.CLAIMS), F.col("attempt") - 1)
        .when(step.has(step.GIVES_BACK), F.col("attempt") + 1)
        .otherwise(F.col("attempt"))
    )
    seen = F.xxhash64(
        F.col("ver") - F.lit(1),
        step.was(),
        F.col("prev_fence"),
        F.col("prev_lease_until_ms"),
        F.when(step.has(step.FROM_FINAL), F.lit(-1)).otherwise(before),
        F.when(step.has(step.FROM_RUNNING), F.col("who")).otherwise(F.lit(0)),
    )
    return F.when(F.col("ver") == 1, F.lit(0)).otherwise(seen)


def _flags(cut: Sequence[str]) -> Column:
    """What is wrong with an event by itself, and what it says of its job for good."""
    of_step = F.shiftleft(step.contract_bit(), KNOWN_AT)
    of_step = of_step.bitwiseOR(_flag(_is_behind() & step.is_timed(), LATE_CLOCK))
    of_step = of_step.bitwiseOR(_flag((F.col("ver") == 1) & step.has(step.CLAIMS), STRANGE))
    of_step = of_step.bitwiseOR(_flag(F.coalesce(_is_bad(), F.lit(True)), BAD))
    flags = F.when(F.col("info") == 0, _beside()).otherwise(of_step)
    if cut:
        flags = flags.bitwiseOR(_flag(F.col("journal").isin(list(cut)), CUT))
    first = F.shiftleft(F.col("priority").cast("bigint"), PRIORITY_AT)
    first = F.when(step.has(step.SUBMITS), first).otherwise(F.lit(0).cast("bigint"))
    return flags.cast("bigint").bitwiseOR(first)


def _flag(condition: Column, flag: int) -> Column:
    return F.when(condition, F.lit(flag)).otherwise(0)


def _is_bad() -> Column:
    """Of an allowed step: whether its numbers are wrong."""
    leased = F.col("lease_until_ms") > 0
    fence = F.col("prev_fence") + step.has(step.CLAIMS).cast("int")
    shortened = F.col("lease_until_ms") < F.col("prev_lease_until_ms")
    begins = step.has(step.SUBMITS + step.REOPENS)
    return (
        ((leased != step.has(step.TO_RUNNING)) & ~step.has(step.REMOVES))
        | (F.col("fence") != fence)
        | (step.has(step.REAPS) & (F.col("ts_ms") < F.col("prev_lease_until_ms")))
        | (step.has(step.EXTENDS) & shortened)
        | ((F.col("max_attempts") > 0) & (F.col("attempt") > F.col("max_attempts")))
        | (begins & (F.col("attempt") != 0))
        | (step.has(step.SUBMITS) & ((F.col("fence") != 0) | (F.col("ver") != 1)))
        | ((F.col("ver") == 1) & ~step.has(step.SUBMITS + step.CLAIMS))
        | (F.col("ver") <= 0)
        | (F.col("ver") >= _VER_MAX)
    )


def _is_behind() -> Column:
    return F.shiftright("pos", PLACE_BITS) - F.col("ts_ms") > CLOCK_SLACK_MS


def _beside() -> Column:
    """The flags of an event that is no allowed step, by its texts."""
    name = F.col("type")
    flags = _flag(F.col("ver") > 0, BAD).bitwiseOR(_flag(name == "pause", PAUSES))
    flags = flags.bitwiseOR(_flag((name == "expire") & (F.col("ver") == 0), EXPIRED))
    late = _is_behind() & F.col("contract").isin(*TIMED) & (name != "submit")
    contract = F.lit(0)
    for number, known in enumerate(CONTRACTS):
        contract = F.when(F.col("contract") == known, F.lit(1 << number)).otherwise(contract)
    flags = flags.bitwiseOR(_flag(late, LATE_CLOCK))
    return flags.bitwiseOR(F.shiftleft(contract, KNOWN_AT))


__all__ = ["KEYS", "Steps", "job_keys", "merged", "proof", "unproven"]
