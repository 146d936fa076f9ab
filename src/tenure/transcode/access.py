"""The job's credentials, opened in memory, and refreshed when storage refuses them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from tenure.core.errors import TenureError
from tenure.core.lease import Lease
from tenure.core.outcome import Fatal
from tenure.vault.credentials import CredentialStore, StoredCredentials
from tenure.vault.envelope import Vault

Answer = TypeVar("Answer")
Refresh = Callable[[Lease, int], Awaitable[StoredCredentials]]
"""Credentials above the refused version; `tenure.webhooks.refresh` has one."""


class AccessDenied(TenureError):
    """Storage answered 401 or 403, or that the token has expired."""

    code = "access_denied"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Opened credentials, for the source and for the destination."""

    version: int
    source: Mapping[str, Any] = field(repr=False)
    destination: Mapping[str, Any] = field(repr=False)


class Access:
    """One attempt's way to its credentials."""

    def __init__(
        self, lease: Lease, store: CredentialStore, vault: Vault, refresh: Refresh
    ) -> None:
        self._lease = lease
        self._store = store
        self._vault = vault
        self._refresh = refresh
        self._opened: Credentials | None = None

    async def use(self, action: Callable[[Credentials], Awaitable[Answer]]) -> Answer:
        """Do it; when storage refuses, do it again with refreshed credentials.

        The refresher counts and ends the job at its limit, so this ends too.
        """
        if self._opened is None:
            self._opened = await self._open(await self._store.read(self._lease))
        while True:
            try:
                return await action(self._opened)
            except AccessDenied:
                stored = await self._refresh(self._lease, self._opened.version)
                self._opened = await self._open(stored)

    async def _open(self, stored: StoredCredentials) -> Credentials:
        if stored.sealed is None:
            return Credentials(stored.version, {}, {})
        plain = await self._vault.open(stored.sealed, stored.binding)
        try:
            said = msgspec.json.decode(plain.reveal(), type=dict[str, dict[str, Any]])
        except msgspec.MsgspecError:
            # Not its words: they quote what does not fit.
            raise Fatal(
                'the credentials are no object with "source" and "destination" objects',
                code="bad_credentials",
            ) from None
        return Credentials(stored.version, said.get("source", {}), said.get("destination", {}))
