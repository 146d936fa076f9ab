"""The queues of a dashboard by name, and the kinds of their contracts' states and events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

from tenure.core.errors import NotFound, StoreError
from tenure.core.seam import Journal, Ledger, Queue
from tenure.core.state import MACHINES

T = TypeVar("T")

Kind = Literal["waiting", "running", "done", "failed", "cancelled", "other"]
KINDS: tuple[Kind, ...] = ("waiting", "running", "done", "failed", "cancelled")

_STATES: dict[Kind, str] = {
    "waiting": "waiting queued wait prioritized delayed waiting-children paused pending scheduled",
    "running": "running active claimed fetching processing uploading",
    "done": "done completed succeeded",
    "failed": "failed error dlq dead_letter dead",
    "cancelled": "canceled cancelled",
}
# Event types that are not states, by the kind of state that they lead to.
_EVENTS: dict[Kind, str] = {
    "waiting": "added retry retrying snooze release stalled reap promote reopen submit",
    "running": "started claim",
    "done": "complete",
    "failed": "bury fail expire",
    "cancelled": "cancel",
}
_KIND_OF_STATE = {word: kind for kind, words in _STATES.items() for word in words.split()}
_KIND_OF_EVENT = {word: kind for kind, words in _EVENTS.items() for word in words.split()}


@dataclass(frozen=True, slots=True)
class OpenQueue:
    """One queue with its ledger and journal. `name` is unique within a registry.

    `address` is its URL without a password. `outbox` holds its webhook events, if it has any.
    """

    name: str
    contract: str
    queue: Queue
    ledger: Ledger
    journal: Journal
    address: str = ""
    outbox: Ledger | None = None

    async def close(self) -> None:
        """Close all connections."""
        for part in (self.queue, self.ledger, self.journal, self.outbox):
            if part is not None:
                await part.close()


class QueueRegistry:
    """Queues by name, in the order of the settings."""

    def __init__(self, queues: Iterable[OpenQueue]) -> None:
        self._queues = {queue.name: queue for queue in queues}

    def __iter__(self) -> Iterator[OpenQueue]:
        return iter(self._queues.values())

    @property
    def names(self) -> list[str]:
        """The names, in order."""
        return list(self._queues)

    def __getitem__(self, name: str) -> OpenQueue:
        queue = self._queues.get(name)
        if queue is None:
            raise NotFound(f"there is no such queue; this gateway serves {', '.join(self.names)}")
        return queue


async def gather_available(calls: Iterable[Awaitable[T]]) -> list[T | None]:
    """The results, None for a queue whose store does not answer; raises if no store answers."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    failed = [each for each in answers if isinstance(each, BaseException)]
    for error in failed:
        if not isinstance(error, StoreError) or len(failed) == len(answers):
            raise error
    return [None if isinstance(each, BaseException) else each for each in answers]


def kind_of(state: str) -> Kind:
    """The kind of a state of any contract.

    >>> [kind_of(word) for word in ("prioritized", "DLQ", "uploading", "mine")]
    ['waiting', 'failed', 'running', 'other']
    """
    return _KIND_OF_STATE.get(state.lower(), "other")


def event_kind(word: str) -> Kind | None:
    """The kind of state after an event; None for events without a change, such as progress."""
    lowered = word.lower()
    return _KIND_OF_STATE.get(lowered) or _KIND_OF_EVENT.get(lowered)


def states_of(contract: str, counted: tuple[str, ...]) -> tuple[str, ...]:
    """The states of a queue: those of its state machine and those in its counts."""
    machine = MACHINES.get(contract)
    return tuple(dict.fromkeys((*(machine.states if machine else ()), *counted)))
