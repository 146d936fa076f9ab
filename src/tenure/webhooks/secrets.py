"""Signing secrets by requester: where they come from, and the operator's own file of them.

A line of that file is `requester = secret`, or `requester = newer older` while one replaces the
other; the line of `*` is for every requester that has none. `#` begins a comment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tenure.core.errors import UsageError
from tenure.vault.secret import Secret
from tenure.webhooks.signing import SECRETS_MAX, read_secret

_EVERYBODY = "*"
_REQUESTERS_MAX = 10_000


class EndpointSecrets(Protocol):
    """Where signing secrets are kept; the ledger of an inbox is such a place."""

    async def live(self, requester_id: str) -> Sequence[Secret]:
        """The requester's live secrets, the newest first: one, or two during a rotation.

        As they were given to the requester (`whsec_...`), or as bare bytes.
        """


async def live_keys(secrets: EndpointSecrets, requester_id: str) -> list[bytes]:
    """The keys to sign with, at most two of them."""
    found = [one.reveal() for one in await secrets.live(requester_id)]
    return [
        read_secret(raw.decode()) if raw.startswith(b"whsec_") else raw
        for raw in found[:SECRETS_MAX]
    ]


class Together:
    """Asks one place after the other: the first that knows the requester counts."""

    def __init__(self, *places: EndpointSecrets) -> None:
        self._places = places

    async def live(self, requester_id: str) -> Sequence[Secret]:
        """The secrets of the first place that has any."""
        for place in self._places:
            if found := await place.live(requester_id):
                return found
        return []


class Remembered:
    """What another place knows, asked for once a second and requester and not at every delivery.

    A secret that is new, or has run out, is noticed that much later; an attempt that was refused
    for it is made again later than that. Whoever asks while the place is being asked waits for the
    same answer; an error is told to them and not remembered.
    """

    def __init__(
        self,
        place: EndpointSecrets,
        *,
        keep_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = place
        self._keep_s = keep_s
        self._clock = clock
        self._known: dict[str, tuple[float, Sequence[Secret]]] = {}
        self._asking: dict[str, asyncio.Task[Sequence[Secret]]] = {}

    async def live(self, requester_id: str) -> Sequence[Secret]:
        """The secrets as they were at most `keep_s` ago."""
        known = self._known.get(requester_id)
        if known is not None and self._clock() < known[0]:
            return known[1]
        asking = self._asking.get(requester_id)
        if asking is None:
            asking = asyncio.get_running_loop().create_task(self._ask(requester_id))
            self._asking[requester_id] = asking
        # Shielded: a delivery that is ended must not take the answer from the others.
        return await asyncio.shield(asking)

    async def _ask(self, requester_id: str) -> Sequence[Secret]:
        until = self._clock() + self._keep_s  # from when it was asked, not from when it was told
        try:
            found = await self._place.live(requester_id)
        finally:
            del self._asking[requester_id]
        if len(self._known) >= _REQUESTERS_MAX:
            self._known.clear()
        self._known[requester_id] = (until, found)
        return found


class StaticSecrets:
    """Satisfies `EndpointSecrets` from memory."""

    def __init__(self, by_requester: dict[str, list[Secret]]) -> None:
        self._by_requester = by_requester

    async def live(self, requester_id: str) -> Sequence[Secret]:
        """The requester's own secrets, else everybody's, else none."""
        everybody = self._by_requester.get(_EVERYBODY, [])
        return self._by_requester.get(requester_id, everybody)

    def has(self, requester_id: str) -> bool:
        """Whether the requester has one, of its own or everybody's."""
        return not self._by_requester.keys().isdisjoint((requester_id, _EVERYBODY))


def read_secrets(text: str) -> StaticSecrets:
    """Read the lines; what is wrong is told by its line and never by its words."""
    found: dict[str, list[Secret]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        name, _, words = entry.partition("=")
        requester, given = name.strip(), words.split()
        if not requester or requester in found or not 1 <= len(given) <= SECRETS_MAX:
            raise UsageError(
                f"webhook secrets, line {number}: write `requester = secret`, or two secrets, "
                "newer first, and each requester once"
            )
        try:
            found[requester] = [Secret(read_secret(word)) for word in given]
        except ValueError as error:
            raise UsageError(f"webhook secrets, line {number}: {error}") from None
    return StaticSecrets(found)
