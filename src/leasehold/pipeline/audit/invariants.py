"""The invariants that a journal alone can show, by the numbers of `core.fold`.

Each names the columns it needs. A history that lacks one of them (another system's, or a step that
a foreign client made) is not judged by that invariant: it is counted as not observable.
"""

from __future__ import annotations

import msgspec

from leasehold.core.state import MACHINES

ALL = tuple(MACHINES)
# Others may work on these queues with programs that leave no events.
FOREIGN = ("bullmq", "omniq")
# Where what was submitted first is promised to be claimed first.
IN_LINE = ("memory", "streams")
# Where a position holds the store's own time.
TIMED = ("streams", "bullmq", "omniq")


class Invariant(msgspec.Struct, frozen=True):
    """One promise, what it needs to be seen, and for which contracts it is made."""

    number: str
    text: str
    needs: tuple[str, ...]
    contracts: tuple[str, ...] = ALL


_STEP = ("ver", "from_state", "to_state")
_FENCE = ("fence", "prev_fence")
_LEASE = ("lease_until_ms", "prev_lease_until_ms")

INVARIANTS = (
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
    Invariant("I22", "order: submitted first, claimed first", ("pos", "priority"), IN_LINE),
    Invariant("I24", "pause: no claim between pause and resume", ("pos",)),
    Invariant("I35", "time: the store's clock does not go back", ("pos", "ts_ms"), TIMED),
)
BY_NUMBER = {invariant.number: invariant for invariant in INVARIANTS}

# Of every event: without these no history can be checked at all.
CHAIN_NEEDS = tuple(dict.fromkeys((*_STEP, *_FENCE, *_LEASE, "attempt", "ts_ms")))


def applies_to(invariant: Invariant) -> str:
    """For a table that people read."""
    return "all" if invariant.contracts == ALL else ", ".join(invariant.contracts)
