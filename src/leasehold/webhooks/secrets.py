"""Signing secrets by requester: where they come from, and the operator's own file of them.

A line of that file is `requester = secret`, or `requester = newer older` while one replaces the
other; the line of `*` is for every requester that has none. `#` begins a comment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from leasehold.core.errors import UsageError
from leasehold.vault.secret import Secret
from leasehold.webhooks.signing import SECRETS_MAX, read_secret

_EVERYBODY = "*"


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


class StaticSecrets:
    """Satisfies `EndpointSecrets` from memory."""

    def __init__(self, by_requester: dict[str, list[Secret]]) -> None:
        self._by_requester = by_requester

    async def live(self, requester_id: str) -> Sequence[Secret]:
        """The requester's own secrets, else everybody's, else none."""
        everybody = self._by_requester.get(_EVERYBODY, [])
        return self._by_requester.get(requester_id, everybody)


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
