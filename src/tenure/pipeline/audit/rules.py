"""What a history may be: the invariants that are judged, and the steps that the contracts allow.

Each invariant names the columns it needs. A history that lacks one (of another system, or a step
that a foreign client made) is not checked for it. What no journal can show is listed in
docs/howto/pipeline.md with the tests that show it.

The proof joins the table of steps to the events. It is made with the same function that
`core.journal` checks steps with, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import msgspec
import pyarrow as pa

from tenure.core.journal import BY_HOLDER, EVENT_TYPES, is_allowed
from tenure.core.registry import contracts, machines
from tenure.core.state import Machine

_CONTRACTS = contracts()
ALL = tuple(_CONTRACTS)
# Other programs may serve these queues and write no events.
FOREIGN = tuple(name for name, each in _CONTRACTS.items() if each.foreign_writers)
# Contracts that promise first in, first out.
IN_LINE = tuple(name for name, each in _CONTRACTS.items() if each.is_fifo)
# Contracts whose journal positions hold the store's own time.
TIMED = tuple(name for name, each in _CONTRACTS.items() if each.is_timed)
# Contracts that send events to receivers, through an outbox.
TELLING = tuple(name for name, each in _CONTRACTS.items() if "outbox" in each.parts)


class Invariant(msgspec.Struct, frozen=True):
    """One invariant, the columns it needs, and the contracts it holds for."""

    number: str
    text: str
    needs: tuple[str, ...]
    contracts: tuple[str, ...] = ALL


_STEP = ("ver", "from_state", "to_state")
_FENCE = ("fence", "prev_fence")
_LEASE = ("lease_until_ms", "prev_lease_until_ms")

JUDGED = (
    Invariant("I1", "no loss: at the end every job has ended", _STEP),
    Invariant(
        "I3", "one place: a job holds a lease exactly while it runs", ("ts_ms", *_STEP, *_LEASE)
    ),
    Invariant("I4", "chain: each event begins where the last one ended", (*_STEP, *_FENCE)),
    Invariant("I5", "an end is an end: only a reopen changes a finished job", _STEP),
    Invariant("I6", "fence: one more with every claim, unchanged by all else", _FENCE),
    Invariant("I7", "exclusion: no claim while another lease is held", _STEP),
    Invariant("I8", "no stale accept: every accepted write is its holder's", ("worker_id",)),
    Invariant("I10", "only what ran out is taken back", ("ts_ms", *_LEASE)),
    Invariant("I11", "only the owner extends, and never to an earlier time", _LEASE),
    Invariant("I12", "one end per epoch", _STEP),
    Invariant("I13", "budget: each start counts one, none beyond the limit", ("attempt",)),
    Invariant("I14", "duplicates: no further start without a failure or a return", ("type",)),
    Invariant("I22", "order: submitted first, claimed first", ("pos", "priority"), IN_LINE),
    Invariant("I24", "pause: no claim between pause and resume", ("pos",)),
    Invariant("I28", "a receiver never goes back", ("pos", "gid"), TELLING),
    Invariant("I35", "time: the store's clock does not go back", ("pos", "ts_ms"), TIMED),
)

BY_NUMBER = {invariant.number: invariant for invariant in JUDGED}


def applies_to(invariant: Invariant) -> str:
    """For a table that people read."""
    return "all" if invariant.contracts == ALL else ", ".join(invariant.contracts)


MACHINES = machines()
CONTRACTS = tuple(MACHINES)
# What a step left: a job that waits, runs, has ended, or is gone.
WAITING, RUNNING, FINAL, GONE = 0, 1, 2, 3
# The kinds of the states before and after, and types that have rules of their own.
FROM_RUNNING, TO_RUNNING, FROM_FINAL, TO_FINAL = 1, 2, 4, 8
_TYPES = {
    "submit": 16,
    "claim": 32,
    "release": 64,
    "snooze": 64,
    "reap": 128,
    "remove": 256,
    "reopen": 512,
    "extend": 1024,
}
_IN_LINE, _TIMED, _CONTRACT_AT = 64, 128, 8
_BESIDE = ("reject", "pause", "resume")
_NAMES = ("contract", "type", "from_state", "to_state")
STEP_NUMBERS = ("bits", "kind", "was", "becomes", "marks")


def marks_of(contract: str) -> int:
    """Which contract it is, whether it promises FIFO, and whether its positions hold the time."""
    mark = 1 << (_CONTRACT_AT + CONTRACTS.index(contract))
    return mark + _IN_LINE * (contract in IN_LINE) + _TIMED * (contract in TIMED)


@cache
def known_steps() -> pa.Table:
    """Every allowed step: bits of its states and type, what it left, numbers of the states."""
    rows = [
        dict(zip(_NAMES, (machine.contract, *step), strict=True)) | _numbers(machine, step)
        for machine in MACHINES.values()
        for step in _steps_of(machine)
    ]
    types = [pa.field(name, pa.string()) for name in _NAMES]
    return pa.Table.from_pylist(
        rows, pa.schema(types + [pa.field(name, pa.int32()) for name in STEP_NUMBERS])
    )


def _steps_of(machine: Machine) -> Iterator[tuple[str, str, str]]:
    """The allowed steps, without claims of running jobs and writes to jobs that do not run."""
    states = _states(machine)
    for name in EVENT_TYPES:
        for here in states:
            from_running = here in machine.running
            # I7 and I8: `core.journal` reports these as their own invariants.
            if (name == "claim" and from_running) or (name in BY_HOLDER and not from_running):
                continue
            for there in states:
                if name not in _BESIDE and is_allowed(machine, name, here, there):
                    yield name, here, there


def _states(machine: Machine) -> tuple[str, ...]:
    return ("", "removed", *machine.states)


def _numbers(machine: Machine, step: tuple[str, str, str]) -> dict[str, int]:
    name, here, there = step
    bits = (
        FROM_RUNNING * (here in machine.running)
        + TO_RUNNING * (there in machine.running and name != "remove")
        + FROM_FINAL * (here in machine.final)
        + TO_FINAL * (there in machine.final and name != "remove")
        + _TYPES.get(name, 0)
    )
    left = RUNNING if bits & TO_RUNNING else FINAL if bits & TO_FINAL else WAITING
    states = _states(machine)
    return {
        "bits": bits,
        "kind": GONE if name == "remove" else left,
        "was": states.index(here),
        "becomes": states.index(there),
        "marks": marks_of(machine.contract),
    }
