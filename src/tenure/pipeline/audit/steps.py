"""A table of the steps that the contracts allow, and the lookup of columns of events in it.

The table is made with the same function that `core.journal` checks steps with, so the two cannot
disagree. What the proof needs to know of a step is packed into one number: the states before and
after, and the kind of step. Strings are compared once for each distinct step of a page, not for
each event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
import pyarrow as pa

from tenure.core.journal import BY_HOLDER, EVENT_TYPES, is_allowed
from tenure.core.registry import machines
from tenure.core.state import Machine
from tenure.pipeline.audit.hashing import Ints, codes_of
from tenure.pipeline.audit.invariants import TIMED

MACHINES = machines()
CONTRACTS = tuple(MACHINES)
WAITING, RUNNING, FINAL, GONE = 0, 1, 2, 3

# The kinds of the states before and after, and the kind of step.
FROM_RUNNING, TO_RUNNING, FROM_FINAL, TO_FINAL = 1, 2, 4, 8
SUBMITS, CLAIMS, GIVES_BACK, REAPS = 16, 32, 64, 128
# IN_TIME: its time should be that in its position; a submit may have an earlier time.
EXTENDS, REMOVES, REOPENS, IN_TIME = 256, 512, 1024, 2048
KIND_AT, CONTRACT_AT, WAS_AT, BECOMES_AT = 12, 14, 20, 25
KIND_MASK, CONTRACT_MASK, STATE_MASK = 3, 63, 31
# Whether the step is allowed; if not, what else it may be.
ALLOWED, PAUSES, EXPIRES = 1 << 32, 1 << 33, 1 << 34

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
NAMED = ("contract", "type", "from_state", "to_state")
_NUMBERS = ("bits", "kind", "was", "becomes")
# Up to this many combinations are looked up in a list.
_LIST_MAX = 1 << 20

Step = tuple[str, ...]


def infos(texts: Sequence[pa.DictionaryArray]) -> Ints:
    """What the proof must know of each event, by its contract, type and two states."""
    return looked_up(texts, _info)


def looked_up(texts: Sequence[pa.DictionaryArray], value: Callable[[Step], int]) -> Ints:
    """For each row the value for its strings; computed once for each combination."""
    code = np.zeros(len(texts[0]), np.int64)
    for each in texts:
        code *= max(1, len(each.dictionary))
        code += codes_of(each)
    words = [each.dictionary.to_pylist() for each in texts]
    size = int(np.prod([max(1, len(each)) for each in words], dtype=np.float64))
    if size > _LIST_MAX:
        present, code = np.unique(code, return_inverse=True)
        return np.array([value(_combination(int(each), words)) for each in present], np.int64)[code]
    values = np.zeros(size, np.int64)
    for each in np.flatnonzero(np.bincount(code, minlength=size)):
        values[each] = value(_combination(int(each), words))
    return values[code]


def _combination(code: int, words: Sequence[Sequence[str]]) -> Step:
    texts: list[str] = []
    for each in reversed(words):
        code, which = divmod(code, len(each))
        texts.append(each[which])
    return tuple(reversed(texts))


def known_steps() -> pa.Table:
    """Every allowed step with what the proof needs to know of it, for other engines."""
    rows = [
        dict(zip(NAMED, step, strict=True)) | _numbers(MACHINES[step[0]], step)
        for step in _sound_steps()
    ]
    types = [pa.field(name, pa.string()) for name in NAMED]
    return pa.Table.from_pylist(
        rows, pa.schema(types + [pa.field(name, pa.int32()) for name in _NUMBERS])
    )


@cache
def _info(step: Step) -> int:
    contract, name, *_ = step
    info = IN_TIME * (contract in TIMED and name != "submit")
    if contract in CONTRACTS:
        info |= 1 << (CONTRACT_AT + CONTRACTS.index(contract))
    if step not in _sound_steps():
        return info | PAUSES * (name == "pause") | EXPIRES * (name == "expire")
    known = _numbers(MACHINES[contract], step)
    info |= ALLOWED | known["bits"] | _OF_TYPE.get(name, 0) | known["kind"] << KIND_AT
    return info | known["was"] << WAS_AT | known["becomes"] << BECOMES_AT


@cache
def _sound_steps() -> dict[Step, None]:
    """In the order of the tables."""
    return {step: None for machine in MACHINES.values() for step in _steps_of(machine)}


def _steps_of(machine: Machine) -> Iterator[Step]:
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
                    yield machine.contract, name, here, there


def _states(machine: Machine) -> tuple[str, ...]:
    return ("", "removed", *machine.states)


def _numbers(machine: Machine, step: Step) -> dict[str, int]:
    """The numbers of an allowed step: its bits, the kind and the two states."""
    _, name, here, there = step
    bits = (
        FROM_RUNNING * (here in machine.running)
        + TO_RUNNING * (there in machine.running and name != "remove")
        + FROM_FINAL * (here in machine.final)
        + TO_FINAL * (there in machine.final and name != "remove")
    )
    left = RUNNING if bits & TO_RUNNING else FINAL if bits & TO_FINAL else WAITING
    states = _states(machine)
    return {
        "bits": bits,
        "kind": GONE if name == "remove" else left,
        "was": states.index(here),
        "becomes": states.index(there),
    }
