"""A table of the steps that the contracts allow, which the proof joins to the events.

The table is made with the same function that `core.journal` checks steps with, so the two cannot
disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pyarrow as pa

from tenure.core.journal import BY_HOLDER, EVENT_TYPES, is_allowed
from tenure.core.registry import machines
from tenure.core.state import Machine
from tenure.pipeline.audit.invariants import IN_LINE, TIMED

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
