"""What the contracts' state words mean to a person: five kinds, one table for all contracts.

Pages know kinds, never contracts. A word that is not in the table is shown as it is and counts as
`other`, so a contract of somebody else's works too.
"""

from __future__ import annotations

from typing import Literal

from tenure.core.state import MACHINES

Kind = Literal["waiting", "running", "done", "failed", "cancelled", "other"]
KINDS: tuple[Kind, ...] = ("waiting", "running", "done", "failed", "cancelled")

_WORDS: dict[Kind, tuple[str, ...]] = {
    "waiting": (
        *("waiting", "queued", "wait", "prioritized", "delayed", "waiting-children", "paused"),
        *("pending", "scheduled"),
    ),
    "running": ("running", "active", "claimed", "fetching", "processing", "uploading"),
    "done": ("done", "completed", "succeeded"),
    "failed": ("failed", "error", "dlq", "dead_letter", "dead"),
    "cancelled": ("canceled", "cancelled"),
}
_KIND_OF = {word: kind for kind, words in _WORDS.items() for word in words}
# Words of a job's own event stream that are no states: when work began, when it waits again.
_EVENT_KIND: dict[str, Kind] = {
    "added": "waiting",
    "retry": "waiting",
    "retrying": "waiting",
    "snooze": "waiting",
    "release": "waiting",
    "stalled": "waiting",
    "reap": "waiting",
    "promote": "waiting",
    "reopen": "waiting",
    "submit": "waiting",
    "started": "running",
    "claim": "running",
    "complete": "done",
    "bury": "failed",
    "fail": "failed",
    "expire": "failed",
    "cancel": "cancelled",
}


def kind_of(state: str) -> Kind:
    """The kind of a state, whichever contract it belongs to.

    >>> [kind_of(word) for word in ("prioritized", "DLQ", "uploading", "mine")]
    ['waiting', 'failed', 'running', 'other']
    """
    return _KIND_OF.get(state.lower(), "other")


def event_kind(word: str) -> Kind | None:
    """What a job became with this event; None for news that change nothing, such as progress."""
    lowered = word.lower()
    return _KIND_OF.get(lowered) or _EVENT_KIND.get(lowered)


def states_of(contract: str, counted: tuple[str, ...]) -> tuple[str, ...]:
    """The states a queue knows: those of its machine and those that its counts name."""
    machine = MACHINES.get(contract)
    return tuple(dict.fromkeys((*(machine.states if machine else ()), *counted)))
