"""All invariants by number: those that a journal can show, and why it cannot show the others.

The first are the invariants of `core.journal`. Each names the columns it needs. A history that
lacks one (of another system, or a step that a foreign client made) is not checked for it.
Invariants that no journal can show are listed too, with the reason; the chaos tests check them,
because they also watch clients, faults and the store. In both cases the jobs are counted as not
observable.
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
    reason: str = ""
    """Why a journal does not show it; empty for those that are checked."""


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


def _elsewhere(number: str, text: str, reason: str) -> Invariant:
    return Invariant(number, text, (), ALL, reason)


_NO_CLIENTS = "what clients sent and were answered is not in the journal"
_NO_STORE = "it takes a scan of the store beside the journal"
_NO_OUTBOX = "deliveries have a record of their own"
_NO_SECRETS = "the journal holds no payload, key or credential"

NOT_OBSERVABLE = (
    _elsewhere("I2", "no invention: every job was asked for", _NO_CLIENTS),
    _elsewhere("I9", "a stale writer is told so", _NO_CLIENTS),
    _elsewhere(
        "I15", "liveness: what is due goes on in time", "whether anybody served is not in it"
    ),
    _elsewhere("I16", "acknowledged only after the commit", "acknowledgements leave no event"),
    _elsewhere("I17", "agreement: no job without its message", _NO_STORE),
    _elsewhere("I18", "a job's own events are those of the journal", _NO_STORE),
    _elsewhere("I19", "the stored state is that of the last event", _NO_STORE),
    _elsewhere("I20", "nothing expires before its end", _NO_STORE),
    _elsewhere("I21", "one job per idempotency key", _NO_CLIENTS),
    _elsewhere("I23", "group: no more run than its limit", "the limits of groups are not in it"),
    _elsewhere("I25", "backpressure: no deeper than the cap", "the cap is not in the journal"),
    _elsewhere("I26", "outbox: a message for every step", _NO_OUTBOX),
    _elsewhere("I27", "every message ends delivered or dead", _NO_OUTBOX),
    _elsewhere("I29", "signed, in time, no nonce twice", _NO_OUTBOX),
    _elsewhere("I30", "credentials: versions only rise", _NO_SECRETS),
    _elsewhere("I31", "no key and nonce twice", _NO_SECRETS),
    _elsewhere("I32", "no secret in any record", _NO_SECRETS),
    _elsewhere("I33", "isolation: nobody sees another's jobs", _NO_CLIENTS),
    _elsewhere("I34", "resources: nothing is left over", "files and traffic leave no event"),
    _elsewhere("I36", "conservation: the store counts what the journal counts", _NO_STORE),
)
INVARIANTS = tuple(
    sorted((*JUDGED, *NOT_OBSERVABLE), key=lambda each: int(each.number.removeprefix("I")))
)
BY_NUMBER = {invariant.number: invariant for invariant in INVARIANTS}

# Of every event: without these no history can be checked at all.
CHAIN_NEEDS = tuple(dict.fromkeys((*_STEP, *_FENCE, *_LEASE, "attempt", "ts_ms")))


def applies_to(invariant: Invariant) -> str:
    """For a table that people read."""
    return "all" if invariant.contracts == ALL else ", ".join(invariant.contracts)
