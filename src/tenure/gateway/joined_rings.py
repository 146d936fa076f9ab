"""The key rings of all stores that a gateway serves, as one.

A key is checked in the store that keeps it. A store that is away takes only its own keys with it:
keys of the others are still found, and a key that is in none of those that answer is a 503 and
not a 401, since it may be kept where nothing can be asked. A key stays where it was made: once its
home is known, only that is asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from tenure.core.endpoint import Caller
from tenure.core.errors import StoreError, StoreUnreachable
from tenure.core.registry import parse_url
from tenure.gateway.keys import Key, Keys, Session
from tenure.gateway.rings import open_keyring

T = TypeVar("T")

ANSWER_S = 2.0
LEFT_ALONE_S = 1.0
_HOMES_MAX = 10_000
# Options that say where a store is, or which part of it.
_PLACE = ("namespace", "schema", "db", "host", "port", "dbname")


class _Member:
    """One ring. After a failure it is left alone for a moment: its callers need not wait too."""

    def __init__(self, ring: Keys) -> None:
        self.ring = ring
        self.counted: int | None = None  # until it has answered once
        self._error: StoreError | None = None
        self._until_s = 0.0

    async def ask(self, question: Callable[[Keys], Awaitable[T]]) -> T:
        if self._error is not None and time.monotonic() < self._until_s:
            raise self._error
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await question(self.ring)
        except (StoreError, TimeoutError) as error:
            away = error if isinstance(error, StoreError) else None
            self._error = away or StoreUnreachable("a key ring gave no answer in time")
            self._until_s = time.monotonic() + LEFT_ALONE_S
            raise self._error from None
        self._error = None
        return answer


class JoinedRings:
    """Satisfies `Keys` over several rings; `of_queue` says which of them belongs to a queue."""

    def __init__(self, rings: Sequence[Keys], of_queue: Mapping[str, int] | None = None) -> None:
        self._members = [_Member(ring) for ring in rings]
        self._of_queue = of_queue or {}
        self._homes: dict[str, _Member] = {}

    async def find(self, key_id: str) -> Key | None:
        home = self._homes.get(key_id)
        if home is not None:
            return await home.ask(lambda ring: ring.find(key_id))
        found = await _first(self._members, lambda ring: ring.find(key_id))
        if found is None:
            return None
        if len(self._homes) >= _HOMES_MAX:
            self._homes.clear()
        self._homes[key_id] = found[0]
        return found[1]

    async def count(self, queue_url: str = "") -> int:
        """Keys of all rings. One that is away counts as when it answered last.

        Whether one that never answered has keys is not known. Where no other has any, that is an
        error, except for the routes of a queue whose own ring has answered.
        """
        failures = await asyncio.gather(*map(_recount, self._members))
        failed = [failure for failure in failures if failure is not None]
        if len(failed) == len(self._members):
            raise failed[0]
        total = sum(member.counted or 0 for member in self._members)
        if total == 0:
            at = self._of_queue.get(queue_url)
            asked = self._members if at is None else [self._members[at]]
            if any(member.counted is None for member in asked):
                raise failed[0]
        return total

    async def touch(self, key_id: str, now_ms: int) -> None:
        home = self._homes.get(key_id)
        if home is not None:
            await home.ask(lambda ring: ring.touch(key_id, now_ms))

    async def issue(self, caller: Caller) -> str:
        home = self._homes.get(caller.requester)
        members = [home] if home else self._members
        found = await _first(members, lambda ring: ring.issue(caller))
        return found[1] if found else ""  # a ring issues one or raises

    async def redeem(self, ticket: str) -> Caller | None:
        found = await _first(self._members, lambda ring: ring.redeem(ticket))
        return found[1] if found else None

    async def open_session(self, key_id: str, ttl_ms: int, idle_ms: int) -> str:
        home = self._homes.get(key_id)
        members = [home] if home else self._members
        found = await _first(members, lambda ring: ring.open_session(key_id, ttl_ms, idle_ms))
        return found[1] if found else ""  # a ring opens one or raises

    async def find_session(self, session_h: str, *, used: bool = True) -> Session | None:
        found = await _first(self._members, lambda ring: ring.find_session(session_h, used=used))
        return found[1] if found else None

    async def end_sessions(self, *, session_h: str = "", key_id: str = "") -> int:
        """In every ring: an error where one is away, since it may keep the session."""
        takes = {"session_h": session_h, "key_id": key_id}
        asked = (each.ask(lambda ring: ring.end_sessions(**takes)) for each in self._members)
        return sum(await asyncio.gather(*asked))

    async def close(self) -> None:
        for member in self._members:
            await member.ring.close()


async def _first(
    members: Sequence[_Member], question: Callable[[Keys], Awaitable[T | None]]
) -> tuple[_Member, T] | None:
    """The first answer that is not None; an error where there is none and a ring is away."""
    failed: StoreError | None = None
    for member in members:
        try:
            answer = await member.ask(question)
        except StoreError as error:
            failed = error
            continue
        if answer is not None:
            return member, answer
    if failed is not None:
        raise failed
    return None


async def _recount(member: _Member) -> StoreError | None:
    try:
        member.counted = await member.ask(lambda ring: ring.count())
    except StoreError as error:
        return error
    return None


def open_keyrings(queue_urls: Sequence[str]) -> Keys:
    """The rings of these queues, one for each store."""
    urls: list[str] = []
    places: dict[tuple[str, ...], int] = {}
    of_queue: dict[str, int] = {}
    for queue_url in queue_urls:
        url = parse_url(queue_url)
        place = (url.store, *(url.options.get(name, "") for name in _PLACE))
        if place not in places:
            places[place] = len(urls)
            urls.append(queue_url)
        of_queue[queue_url] = places[place]
    rings = [open_keyring(queue_url) for queue_url in urls]
    return rings[0] if len(rings) == 1 else JoinedRings(rings, of_queue)
