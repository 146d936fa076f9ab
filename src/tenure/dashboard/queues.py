"""The queues of a dashboard by name, and the kinds of their contracts' states and events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar, get_args

from tenure.core.errors import NotFound, StoreError
from tenure.core.registry import contracts, find_contract
from tenure.core.seam import Journal, Ledger, Queue
from tenure.core.state import Kind

T = TypeVar("T")

KINDS: tuple[Kind, ...] = get_args(Kind)
# What a job becomes with an event of the journal.
_KIND_OF_EVENT: dict[str, Kind] = {
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


@cache
def _kind_of_state() -> dict[str, Kind]:
    """The kind of every state of every contract."""
    kinds: dict[str, Kind] = {}
    for contract in contracts().values():
        kinds |= contract.kinds
        kinds |= {state.lower(): contract.machine.kind(state) for state in contract.machine.states}
    return kinds


def kind_of(state: str) -> Kind | Literal["other"]:
    """The kind of a state of any contract.

    >>> [kind_of(word) for word in ("prioritized", "DLQ", "uploading", "mine")]
    ['waiting', 'failed', 'running', 'other']
    """
    return _kind_of_state().get(state.lower(), "other")


def event_kind(word: str) -> Kind | None:
    """The kind of state after an event; None for events without a change, such as progress."""
    lowered = word.lower()
    return _kind_of_state().get(lowered) or _KIND_OF_EVENT.get(lowered)


def states_of(contract: str, counted: tuple[str, ...]) -> tuple[str, ...]:
    """The states of a queue: those of its state machine and those in its counts."""
    found = find_contract(contract)
    return tuple(dict.fromkeys((*(found.machine.states if found else ()), *counted)))
