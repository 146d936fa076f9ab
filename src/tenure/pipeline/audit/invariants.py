"""The invariants that a journal can show, by number: those of `core.journal`, and some over jobs.

Each names the columns it needs. A history that lacks one (of another system, or a step that a
foreign client made) is not checked for it. What no journal can show is listed in
docs/howto/pipeline.md with the tests that show it.
"""

from __future__ import annotations

import msgspec

from tenure.core.registry import contracts

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
    Invariant("I3", "one place: a job holds a lease exactly while it runs", (*_STEP, *_LEASE)),
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

INVARIANTS = JUDGED
BY_NUMBER = {invariant.number: invariant for invariant in INVARIANTS}


def applies_to(invariant: Invariant) -> str:
    """For a table that people read."""
    return "all" if invariant.contracts == ALL else ", ".join(invariant.contracts)
