"""Which steps the contracts allow, as a small table that stands beside the events.

It is made of the same rule by which the fold judges a step, so that the two cannot disagree. What
the proof must know of a step is one number: where it leads from and to, what kind of step it is,
and short numbers for its two states. So texts are compared only for an event that is no allowed
step, and such an event is looked at closely anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

from leasehold.core.event import EVENT_TYPES
from leasehold.core.fold import BY_HOLDER, is_allowed
from leasehold.core.state import MACHINES, Machine
from leasehold.pipeline.audit.invariants import TIMED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import Column, DataFrame, SparkSession

CONTRACTS = tuple(MACHINES)
WAITING, RUNNING, FINAL, GONE = 0, 1, 2, 3

# Where a step leads from and to, and what it is.
FROM_RUNNING, TO_RUNNING, FROM_FINAL, TO_FINAL = 1, 2, 4, 8
SUBMITS, CLAIMS, GIVES_BACK, REAPS = 16, 32, 64, 128
EXTENDS, REMOVES, REOPENS, IN_TIME = 256, 512, 1024, 2048
_KIND_AT, _CONTRACT_AT, _WAS_AT, _BECOMES_AT = 12, 14, 20, 25
_KIND_BITS, _CONTRACT_BITS, _STATE_BITS = 2, 6, 5

_OF_TYPE = {
    "submit": SUBMITS,
    "claim": CLAIMS,
    "release": GIVES_BACK,
    "snooze": GIVES_BACK,
    "reap": REAPS,
    "extend": EXTENDS,
    "remove": REMOVES,
    "reopen": REOPENS,
}
_BESIDE = ("reject", "pause", "resume")
_NAMED = ("contract", "type", "from_state", "to_state")
_NUMBERS = ("bits", "kind", "was", "becomes", "info")

Step = tuple[str, str, str, str]


class Steps:
    """The allowed steps, by a hash that Spark looks up beside the events.

    A table, not a condition: of a thousand alternatives the planning alone took seconds.
    """

    def __init__(self, spark: SparkSession) -> None:
        named = spark.createDataFrame(known_steps().select([*_NAMED, "info"]))
        self.table: DataFrame = named.select(step_hash().alias("step"), "info")


def step_hash() -> Column:
    """A number for what kind of step an event is."""
    return F.xxhash64(*_NAMED)


def known_steps() -> pa.Table:
    """Every step of a sound history, with what the proof must know of it: singly, and in one."""
    rows = [
        dict(zip(_NAMED, step, strict=True)) | _known(MACHINES[step[0]], step)
        for machine in MACHINES.values()
        for step in _sound_steps(machine)
    ]
    types = [pa.field(name, pa.string()) for name in _NAMED]
    return pa.Table.from_pylist(
        rows, pa.schema(types + [pa.field(name, pa.int32()) for name in _NUMBERS])
    )


def has(bit: int) -> Column:
    """Whether a step is such a one; a step that is not allowed (0) is none of them."""
    return F.col("info").bitwiseAND(F.lit(bit)) != 0


def is_timed() -> Column:
    """Whether its time should be that of its place: a job may be submitted with an older time."""
    return has(IN_TIME) & ~has(SUBMITS)


def kind() -> Column:
    """What a step left: WAITING, RUNNING, FINAL or GONE."""
    return _part(_KIND_AT, _KIND_BITS)


def contract_bit() -> Column:
    """Its contract, as one of so many bits."""
    return _part(_CONTRACT_AT, _CONTRACT_BITS)


def was() -> Column:
    """The number of the state it led from."""
    return _part(_WAS_AT, _STATE_BITS)


def becomes() -> Column:
    """The number of the state it led to."""
    return _part(_BECOMES_AT, _STATE_BITS)


def _part(at: int, bits: int) -> Column:
    return F.shiftright("info", at).bitwiseAND(F.lit((1 << bits) - 1))


def _sound_steps(machine: Machine) -> Iterator[Step]:
    """What is allowed, less what only a holder or nobody may do from where it begins."""
    states = _states(machine)
    for name in EVENT_TYPES:
        for here in states:
            from_running = here in machine.running
            # I7 and I8: for the fold, these are no matter of the table alone.
            if (name == "claim" and from_running) or (name in BY_HOLDER and not from_running):
                continue
            for there in states:
                if name not in _BESIDE and is_allowed(machine, name, here, there):
                    yield machine.contract, name, here, there


def _states(machine: Machine) -> tuple[str, ...]:
    return ("", "removed", *machine.states)


def _known(machine: Machine, step: Step) -> dict[str, int]:
    """What the proof must know of an allowed step."""
    contract, name, here, there = step
    bits = (
        FROM_RUNNING * (here in machine.running)
        + TO_RUNNING * (there in machine.running and name != "remove")
        + FROM_FINAL * (here in machine.final)
        + TO_FINAL * (there in machine.final and name != "remove")
    )
    left = RUNNING if bits & TO_RUNNING else FINAL if bits & TO_FINAL else WAITING
    left = GONE if name == "remove" else left
    states = _states(machine)
    was, becomes = states.index(here), states.index(there)
    info = (
        (bits | _OF_TYPE.get(name, 0) | IN_TIME * (contract in TIMED))
        + (left << _KIND_AT)
        + (1 << (_CONTRACT_AT + CONTRACTS.index(contract)))
        + (was << _WAS_AT)
        + (becomes << _BECOMES_AT)
    )
    return {"bits": bits, "kind": left, "was": was, "becomes": becomes, "info": info}
