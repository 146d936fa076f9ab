"""A queue as the dashboard is given it: a name and the three sides of the seam."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator
from typing import Protocol, TypeVar

from tenure.core.errors import NotFound, StoreError
from tenure.core.seam import Journal, Ledger, Queue

T = TypeVar("T")


class House(Protocol):
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


class Street:
    """All houses of a gateway, by name."""

    def __init__(self, houses: Iterable[House]) -> None:
        self._houses = {house.name: house for house in houses}

    def __iter__(self) -> Iterator[House]:
        return iter(self._houses.values())

    @property
    def names(self) -> list[str]:
        """In the order in which they were given."""
        return list(self._houses)

    def __getitem__(self, name: str) -> House:
        house = self._houses.get(name)
        if house is None:
            raise NotFound(f"there is no such queue; this gateway serves {', '.join(self.names)}")
        return house


async def that_answer(asked: Iterable[Awaitable[T]]) -> list[T | None]:
    """What each queue said, None of those whose store is away; an error where all of them are."""
    said = await asyncio.gather(*asked, return_exceptions=True)
    failed = [each for each in said if isinstance(each, BaseException)]
    for error in failed:
        if not isinstance(error, StoreError) or len(failed) == len(said):
            raise error
    return [None if isinstance(each, BaseException) else each for each in said]
