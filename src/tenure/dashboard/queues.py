"""The queues that a dashboard shows, by name, and what the states of their contracts mean."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator
from typing import Literal, Protocol, TypeVar

from tenure.core.errors import NotFound, StoreError
from tenure.core.seam import Journal, Ledger, Queue
from tenure.core.state import MACHINES

T = TypeVar("T")


class ServedQueue(Protocol):
    """One served queue. `name` is unique within a gateway."""

    @property
    def name(self) -> str: ...
    @property
    def contract(self) -> str: ...
    @property
    def queue(self) -> Queue: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def journal(self) -> Journal: ...
    @property
    def address(self) -> str:
        """Its URL without a password, for people who want to reach it with their own program."""

    @property
    def outbox(self) -> Ledger | None:
        """Where its events wait to be delivered, if it tells of its jobs by webhooks."""


class QueueRegistry:
    """All houses of a gateway, by name."""

    def __init__(self, houses: Iterable[ServedQueue]) -> None:
        self._houses = {house.name: house for house in houses}

    def __iter__(self) -> Iterator[ServedQueue]:
        return iter(self._houses.values())

    @property
    def names(self) -> list[str]:
        """In the order in which they were given."""
        return list(self._houses)

    def __getitem__(self, name: str) -> ServedQueue:
        house = self._houses.get(name)
        if house is None:
            raise NotFound(f"there is no such queue; this gateway serves {', '.join(self.names)}")
        return house


async def gather_available(asked: Iterable[Awaitable[T]]) -> list[T | None]:
    """What each queue said, None of those whose store is away; an error where all of them are."""
    said = await asyncio.gather(*asked, return_exceptions=True)
    failed = [each for each in said if isinstance(each, BaseException)]
    for error in failed:
        if not isinstance(error, StoreError) or len(failed) == len(said):
            raise error
    return [None if isinstance(each, BaseException) else each for each in said]


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
