"""The proof: one row a job, by aggregates that need no order and add up in any way.

Every event says what its writer saw and what it left. The exclusive-or over all of a job's events
of both hashes leaves, if the chain is whole, only the last "left" and the first "saw": each other
hash stands there twice. So an unbroken chain is proven up to one chance in 2**64 without sorting,
and rows of parts of the history merge into the row of the whole. What concerns one event alone is
an ordinary condition. Jobs go by two hashes of their id: a shuffle of numbers, not of texts.

A job that is not proven is not yet guilty: it is looked at closely (`explain`).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

from leasehold.core.state import MACHINES, Machine
from leasehold.pipeline.audit.invariants import TIMED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

CONTRACTS = tuple(MACHINES)
KEYS = ("line_h", "job_h", "job_h2")
BAD, LATE_CLOCK, PAUSES = 1, 2, 4
WAITING, RUNNING, FINAL, GONE = 0, 1, 2, 3
CLOCK_SLACK_MS = 1_000
PLACE_BITS = 22

# Where a step leads from and to.
FROM_RUNNING, TO_RUNNING, FROM_FINAL, TO_FINAL = 1, 2, 4, 8

Step = tuple[str, str, str, str]
_STEPS = pa.schema(
    [(name, pa.string()) for name in ("contract", "type", "from_state", "to_state")]
    + [("bits", pa.int32()), ("kind", pa.int32()), ("was", pa.int64()), ("becomes", pa.int64())]
)
_NEEDED = (
    *("journal", "pos", "contract", "queue", "job_id", "type", "ts_ms", "ver", "attempt"),
    *("fence", "prev_fence", "token_h", "worker_id", "lease_until_ms", "prev_lease_until_ms"),
    *("priority", "due_ms", "max_attempts"),
)


class Steps:
    """Which steps the contracts' tables allow, by a hash that Spark looks up beside the events.

    A table, not a condition: of a thousand alternatives the planning alone took seconds.
    """

    def __init__(self, spark: SparkSession) -> None:
        named = spark.createDataFrame(known_steps())
        self.table = named.select(step_hash().alias("step"), "bits", "kind", "was", "becomes")


def known_steps() -> pa.Table:
    """Every allowed step, with what the proof must know of it."""
    rows = [
        {"contract": step[0], "type": step[1], "from_state": step[2], "to_state": step[3]}
        | _known(MACHINES[step[0]], step)
        for step in dict.fromkeys(_allowed_steps())
    ]
    return pa.Table.from_pylist(rows, _STEPS)


def step_hash() -> Column:
    """A number for what kind of step an event is."""
    return F.xxhash64("contract", "type", "from_state", "to_state")


def job_keys() -> dict[str, Column]:
    """By what a job goes in the proof."""
    return {
        "line_h": F.xxhash64("journal", "contract", "queue"),
        "job_h": F.xxhash64("job_id"),
        "job_h2": F.xxhash64(F.lit(1), F.col("job_id")),
    }


def proof(events: DataFrame, steps: Steps, *, cut: Sequence[str] = ()) -> DataFrame:
    """One row a job, for these events; `cut` names the journals whose beginning is missing."""
    known = events.select(*_NEEDED, step_hash().alias("step")).join(
        F.broadcast(steps.table), "step", "left"
    )
    told = known.select(
        "*", F.xxhash64("worker_id", "token_h").alias("who"), _is(FROM_RUNNING).alias("ran")
    )
    marked = told.select(
        *(column.alias(name) for name, column in job_keys().items()),
        *("ver", "type", "pos", "priority", "due_ms"),
        _contract_code().alias("code"),
        (F.col("journal").isin(list(cut)) if cut else F.lit(False)).cast("int").alias("cut"),
        _left().alias("left"),
        _saw().alias("saw"),
        _flags().alias("flags"),
        F.coalesce("kind", F.lit(WAITING)).alias("kind"),
    ).where(F.col("ver").isNotNull())
    is_step = F.col("ver") > 0
    first_claim = F.min(F.when(F.col("type") == "claim", F.col("pos")))
    in_line = (F.col("type") == "submit") & (F.col("due_ms") == 0)
    return marked.groupBy(*KEYS).agg(
        F.count(F.when(is_step, 1)).alias("n"),
        F.min(F.when(is_step, F.col("ver"))).alias("min_ver"),
        F.max("ver").alias("max_ver"),
        F.bit_xor(F.when(is_step, F.col("left").bitwiseXOR(F.col("saw")))).alias("x"),
        F.max_by("left", "ver").alias("last"),
        F.min_by("saw", F.when(is_step, F.col("ver"))).alias("first"),
        F.bit_or("flags").alias("flags"),
        F.max_by("kind", "ver").alias("kind"),
        F.max((F.col("type") == "expire").cast("int")).alias("expired"),
        F.max_by("pos", "ver").alias("last_pos"),
        F.max(F.when(is_step, F.col("pos"))).alias("max_pos"),
        F.min(F.when(in_line, F.col("pos"))).alias("submit_pos"),
        first_claim.alias("claim_pos"),
        F.max("priority").alias("priority"),
        F.max("code").alias("code"),
        F.max("cut").alias("cut"),
    )


def merged(parts: DataFrame) -> DataFrame:
    """Rows of parts of the history as rows of the whole."""
    return parts.groupBy(*KEYS).agg(
        F.sum("n").alias("n"),
        F.min("min_ver").alias("min_ver"),
        F.max("max_ver").alias("max_ver"),
        F.bit_xor("x").alias("x"),
        F.max_by("last", "max_ver").alias("last"),
        F.min_by("first", "min_ver").alias("first"),
        F.bit_or("flags").alias("flags"),
        F.max_by("kind", "max_ver").alias("kind"),
        F.max("expired").alias("expired"),
        F.max_by("last_pos", "max_ver").alias("last_pos"),
        F.max("max_pos").alias("max_pos"),
        F.min("submit_pos").alias("submit_pos"),
        F.min("claim_pos").alias("claim_pos"),
        F.max("priority").alias("priority"),
        F.max("code").alias("code"),
        F.max("cut").alias("cut"),
    )


def unproven(*, quiesced: bool) -> Column:
    """Whether a job's row leaves anything open."""
    no_steps = F.col("n") == 0
    is_broken = (
        (F.col("n") != F.col("max_ver") - F.col("min_ver") + F.lit(1))
        | (F.col("x") != F.col("last").bitwiseXOR(F.col("first")))
        | (F.col("flags").bitwiseAND(F.lit(BAD)) != 0)
        | (F.col("last_pos") != F.col("max_pos"))
        | ((F.col("cut") == 0) & (F.col("min_ver") > 1))
    )
    if quiesced:
        is_broken = is_broken | (~has_ended())
    return ~no_steps & F.coalesce(is_broken, F.lit(True))


def has_ended() -> Column:
    """Whether a job's last step left it finished, removed or expired."""
    return (F.col("kind") >= FINAL) | (F.col("expired") == 1)


def _contract_code() -> Column:
    code = F.lit(-1)
    for number, name in enumerate(MACHINES):
        code = F.when(F.col("contract") == name, F.lit(number)).otherwise(code)
    return code


def _allowed_steps() -> Iterable[Step]:
    for machine in MACHINES.values():
        for kind, here, there in _steps_of(machine):
            yield machine.contract, kind, here, there


def _steps_of(machine: Machine) -> Iterable[tuple[str, str, str]]:
    yield from (("submit", "", state) for state in machine.initial)
    for state in machine.states:
        if state in machine.running:
            yield from ((kind, state, state) for kind in ("extend", "report"))
        else:
            yield from (("remove", state, gone) for gone in ("", "removed", state))
    for here, targets in machine.steps.items():
        yield from ((kind, here, there) for there in targets for kind in _TYPES)
    for here, targets in machine.reopen.items():
        yield from (("reopen", here, there) for there in targets)


_TYPES = (
    *("claim", "promote", "complete", "retry", "bury", "snooze", "release", "reap", "cancel"),
    *("expire", "report"),
)


def _known(machine: Machine, step: Step) -> dict[str, int]:
    """What the proof must know of an allowed step."""
    _, name, here, there = step
    bits = (
        FROM_RUNNING * (here in machine.running)
        + TO_RUNNING * (there in machine.running)
        + FROM_FINAL * (here in machine.final)
        + TO_FINAL * (there in machine.final and name != "remove")
    )
    kind = RUNNING if bits & TO_RUNNING else FINAL if bits & TO_FINAL else WAITING
    return {
        "bits": bits,
        "kind": GONE if name == "remove" else kind,
        "was": zlib.crc32(here.encode()),
        "becomes": zlib.crc32(there.encode()),
    }


def _is(bit: int) -> Column:
    """Whether a step is such a one; a step that is not allowed is none of them."""
    return F.coalesce(F.col("bits").bitwiseAND(F.lit(bit)) != 0, F.lit(False))


def _left() -> Column:
    """What an event left behind, with its number."""
    return F.xxhash64(
        F.col("ver"),
        F.col("becomes"),
        F.col("fence"),
        F.col("lease_until_ms"),
        F.when(_is(TO_FINAL), F.lit(-1)).otherwise(F.col("attempt")),
        F.when(_is(TO_RUNNING), F.col("who")).otherwise(F.lit(0)),
    )


def _saw() -> Column:
    """What its writer found, in the same words; nothing before the first."""
    before = (
        F.col("attempt")
        - (F.col("type") == "claim").cast("int")
        + F.col("type").isin("release", "snooze").cast("int")
    )
    seen = F.xxhash64(
        F.col("ver") - F.lit(1),
        F.col("was"),
        F.col("prev_fence"),
        F.col("prev_lease_until_ms"),
        F.when(_is(FROM_FINAL), F.lit(-1)).otherwise(before),
        F.when(F.col("ran"), F.col("who")).otherwise(F.lit(0)),
    )
    return F.when((F.col("ver") == 1) & (F.col("type") == "submit"), F.lit(0)).otherwise(seen)


def _flags() -> Column:
    """What is wrong with an event by itself."""
    kind = F.col("type")
    claims = (kind == "claim").cast("int")
    leased = F.col("lease_until_ms") > 0
    is_bad = (
        F.col("bits").isNull()
        | ((leased != _is(TO_RUNNING)) & (kind != "remove"))
        | (F.col("fence") != F.col("prev_fence") + claims)
        | ((kind == "reap") & (F.col("ts_ms") < F.col("prev_lease_until_ms")))
        | ((kind == "extend") & (F.col("lease_until_ms") < F.col("prev_lease_until_ms")))
        | ((F.col("max_attempts") > 0) & (F.col("attempt") > F.col("max_attempts")))
    )
    behind = F.shiftright("pos", PLACE_BITS) - F.col("ts_ms")
    is_late = F.col("contract").isin(*TIMED) & (kind != "submit") & (behind > CLOCK_SLACK_MS)
    bad = F.when((F.col("ver") > 0) & F.coalesce(is_bad, F.lit(True)), F.lit(BAD)).otherwise(0)
    late = F.when(F.coalesce(is_late, F.lit(False)), F.lit(LATE_CLOCK)).otherwise(0)
    return bad + late + F.when(kind == "pause", F.lit(PAUSES)).otherwise(0)


__all__ = ["KEYS", "Steps", "job_keys", "known_steps", "merged", "proof", "unproven"]
