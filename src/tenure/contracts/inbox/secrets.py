"""The webhook secrets of requesters: sealed in the ledger, opened where webhooks are signed.

A secret is bound to its own name and to its requester, so that a row copied to another requester
does not open. Names cannot be those of jobs: no job id has a slash.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tenure.core.errors import UsageError
from tenure.ledger.engine import INBOX, Engine, Row
from tenure.ledger.ids import uuid7

OVERLAP_MS = 86_400_000
SECRET_PREFIX = "whsec_"
NAME_PREFIX = "webhook-secret/"
_VERSION = 1
_OPENED_MAX = 10_000
_PAGE = 100

Seal = Callable[[bytes, str, str, int], Awaitable[Mapping[str, Any]]]
"""Plaintext, and the name, requester and version it is for, to the four columns of a job."""


class WebhookSecrets:
    """The signing secrets of requesters: the newest, and the one before it for a day.

    What was opened once stays in this process's memory: a key service is not asked for every
    delivery.
    """

    def __init__(self, engine: Engine, vault: Any = None) -> None:
        self._engine = engine
        self._vault = vault
        self._opened: dict[str, Any] = {}

    async def live(self, requester_id: str) -> Sequence[Any]:
        """The live secrets, newest first, in the vault's wrapping that no log shows."""
        rows = await self._engine.run(INBOX, "secrets_live", requester_id=requester_id)
        return [await self._open(row) for row in rows]

    async def has(self, requester_id: str) -> bool:
        """Whether the requester has a live one; nothing is opened."""
        return bool(await self._engine.run(INBOX, "secrets_live", requester_id=requester_id))

    async def renew(self, requester_id: str, seal: Seal) -> str:
        """A new secret, shown this once; the one before stays live for a day."""
        # Plain base64, as the libraries for Standard Webhooks read it.
        text = SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()
        name = NAME_PREFIX + uuid7()
        columns = _named(await seal(text.encode(), name, requester_id, _VERSION))
        await self._engine.run(
            *(INBOX, "secret_add"),
            **{"requester_id": requester_id, "name": name, "overlap_ms": OVERLAP_MS, **columns},
        )
        return text

    async def seal_plain(self) -> int:
        """Seal what lies open, from before secrets were sealed; how many."""
        sealed = 0
        while rows := await self._engine.run(INBOX, "secrets_plain", count=_PAGE):
            for row in rows:
                await self._seal(row)
            sealed += len(rows)
        return sealed

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.close()

    async def _open(self, row: Row) -> Any:
        from tenure.vault import Sealed, Secret

        name = row["name"]
        if row["secret"]:
            if self._vault is not None:
                await self._seal(row)
            return Secret(row["secret"])
        if name not in self._opened:
            columns = bytes(row["encrypted"]), bytes(row["dek_wrapped"]), row["kek_id"]
            sealed = Sealed(*columns, row["encryption_version"])
            opened = await self._with_keys().open(sealed, _binding(row))
            if len(self._opened) >= _OPENED_MAX:
                self._opened.clear()
            self._opened[name] = opened
        return self._opened[name]

    async def _seal(self, row: Row) -> None:
        from tenure.vault import Secret

        sealed = await self._with_keys().seal(Secret(row["secret"]), _binding(row))
        await self._engine.run(
            INBOX,
            "secret_seal",
            name=row["name"],
            encrypted=sealed.encrypted,
            dek_wrapped=sealed.dek_wrapped,
            kek_id=sealed.kek_id,
            encryption_version=sealed.encryption_version,
        )

    def _with_keys(self) -> Any:
        if self._vault is None:
            raise UsageError(
                "webhook secrets are sealed: give whoever signs a key ring (vault.keys)",
                contract="inbox",
            )
        return self._vault


def _binding(row: Row) -> Any:
    from tenure.vault import Binding

    return Binding(row["name"], row["requester_id"], _VERSION)


def _named(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("storage_creds_"): value for name, value in columns.items()}
