"""The queues of a dashboard by name, and what their events make of a job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from tenure.core.errors import NotFound, StoreError
from tenure.core.portable import State, word_state
from tenure.core.registry import find_contract
from tenure.core.seam import Journal, Ledger, Queue

T = TypeVar("T")

# What a job becomes with an event of the journal.
_STATE_AFTER: dict[str, State] = {
    **dict.fromkeys(
        ("retry", "snooze", "release", "reap", "promote", "reopen", "submit"), "waiting"
    ),
    "claim": "running",
    "complete": "done",
    **dict.fromkeys(("bury", "fail", "expire"), "failed"),
    "cancel": "cancelled",
}


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


def event_state(contract: str, word: str) -> State | None:
    """The state of a job after an event; None for events without a change, such as progress."""
    return word_state(contract, word) or _STATE_AFTER.get(word.lower())


def states_of(contract: str, counted: tuple[str, ...]) -> tuple[str, ...]:
    """The states of a queue: those of its state machine and those in its counts."""
    found = find_contract(contract)
    return tuple(dict.fromkeys((*(found.machine.states if found else ()), *counted)))
