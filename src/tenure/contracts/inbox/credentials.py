"""Sealed credentials of jobs and webhook secrets of requesters.

The vault needs a cryptography package, so it is imported when it is used.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tenure.core.errors import LeaseLost, UsageError
from tenure.core.lease import Lease
from tenure.sql.engine import INBOX, Engine, Row
from tenure.sql.settle import token_hash
from tenure.sql.submit import uuid7

_OVERLAP_MS = 86_400_000
SECRET_PREFIX = "whsec_"
_NAME_PREFIX = "webhook-secret/"
_VERSION = 1
_OPENED_MAX = 10_000
_PAGE = 100

Seal = Callable[[bytes, str, str, int], Awaitable[Mapping[str, Any]]]
"""Plaintext, and the name, requester and version it is for, to the four columns of a job."""

_Columns = tuple[bytes, bytes, str, int]
"""Encrypted, wrapped data key, id of the wrapping key, encryption version."""


class SealedColumns:
    """The credential columns of jobs, which are not opened here."""

    def __init__(self, engine: Engine, table: str = INBOX) -> None:
        self._engine = engine
        self._table = table

    async def read(self, lease: Lease) -> Row:
        """The columns of a job; raises `LeaseLost` when the lease is not held."""
        rows = await self._engine.run(self._table, "creds_read", **_proof(lease))
        if not rows:
            raise LeaseLost(lease.job_id)
        return rows[0]

    async def replace(self, lease: Lease, seen_version: int, columns: _Columns) -> bool:
        """Store newer columns and raise the version; False when it is not the one seen."""
        rows = await self._engine.run(
            self._table,
            "creds_replace",
            **_proof(lease),
            seen_version=seen_version,
            **_named(columns),
        )
        if not rows[0]["changed"]:
            await self.read(lease)  # raises if it was not the version that changed but the lease
        return bool(rows[0]["changed"])

    async def put(
        self, job_id: str, requester_id: str, seen_version: int, columns: _Columns
    ) -> bool:
        """The same for the requester of an unfinished job, without a lease."""
        rows = await self._engine.run(
            self._table,
            "creds_put",
            job_id=job_id,
            requester_id=requester_id,
            seen_version=seen_version,
            **_named(columns),
        )
        return bool(rows[0]["changed"])

    async def keep(self, queue: str, kept: bool) -> None:
        """Store whether a queue keeps the credentials of jobs that have ended."""
        await self._engine.run(self._table, "creds_keep", queue=queue, kept=kept)

    async def count_refresh(self, lease: Lease) -> int:
        """Count a refresh for the holder of the lease; returns the count."""
        rows = await self._engine.run(self._table, "creds_count", **_proof(lease))
        if not rows:
            raise LeaseLost(lease.job_id)
        return int(rows[0]["refreshes"])

    async def page(self, *, not_under: str, after: str, limit: int) -> Sequence[Row]:
        """Data keys that are wrapped by another key than this one, by job id."""
        return await self._engine.run(
            self._table, "creds_page", kek_id=not_under, after=after, count=limit
        )

    async def swap(self, rows: Sequence[tuple[str, int, str, bytes, str, bytes]]) -> int:
        """Replace wrapped data keys if version, key id and wrapping are as given; how many."""
        if not rows:
            return 0
        changed = await self._engine.run(self._table, "creds_swap", rows)
        return int(changed[0]["changed"])

    async def counts(self) -> Mapping[str, int]:
        """Rows by key id."""
        rows = await self._engine.run(self._table, "creds_counts")
        return {row["kek_id"]: row["jobs"] for row in rows}

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.close()


def _proof(lease: Lease) -> dict[str, Any]:
    return {"job_id": lease.job_id, "fence": lease.fence, "token_h": token_hash(lease.token)}


def _named(columns: _Columns) -> dict[str, Any]:
    names = ("encrypted", "dek_wrapped", "kek_id", "encryption_version")
    return dict(zip(names, columns, strict=True))


def sealed_columns(sealed: Mapping[str, Any]) -> _Columns:
    """The columns of what `Seal` returns."""
    return (
        sealed["storage_creds_encrypted"],
        sealed["storage_creds_dek_wrapped"],
        sealed["storage_creds_kek_id"],
        sealed["storage_creds_encryption_version"],
    )


class InboxCredentials:
    """The same columns in the types of the vault, for workers and for key rotation.

    A rotation rewraps webhook secrets too: they are rows with the name of the secret as job id.
    """

    def __init__(self, engine: Engine) -> None:
        self._columns = SealedColumns(engine)

    async def read(self, lease: Lease) -> Any:
        """The stored credentials; raises `LeaseLost` if the lease is not held."""
        from tenure.vault import StoredCredentials

        row = await self._columns.read(lease)
        return StoredCredentials(
            binding=_binding(lease.job_id, row),
            sealed=_sealed(row),
            refresh_url=row["refresh_url"] or "",
            refreshes=row["credential_refresh_count"],
        )

    async def replace(self, lease: Lease, *, seen_version: int, sealed: Any) -> bool:
        """Store new columns and raise the version; False if it has changed."""
        return await self._columns.replace(lease, seen_version, _columns_of(sealed))

    async def count_refresh(self, lease: Lease) -> int:
        """Count a refresh; returns the count."""
        return await self._columns.count_refresh(lease)

    async def page(self, *, not_under: str, after: str, limit: int) -> Sequence[Any]:
        """Data keys that are wrapped by another key than this one, by job id."""
        from tenure.vault import WrappedKey

        rows = await self._columns.page(not_under=not_under, after=after, limit=limit)
        return [
            WrappedKey(
                binding=_binding(row["job_id"], row),
                kek_id=row["storage_creds_kek_id"],
                dek_wrapped=bytes(row["storage_creds_dek_wrapped"]),
                encryption_version=row["storage_creds_encryption_version"],
            )
            for row in rows
        ]

    async def swap(self, pairs: Sequence[tuple[Any, Any]]) -> int:
        """Replace wrapped data keys that are still as given; how many."""
        return await self._columns.swap(
            [
                (
                    *(old.binding.job_id, old.binding.credential_version, old.kek_id),
                    *(old.dek_wrapped, new.kek_id, new.dek_wrapped),
                )
                for old, new in pairs
            ]
        )

    async def counts(self) -> Mapping[str, int]:
        """Rows by key id."""
        return await self._columns.counts()

    async def close(self) -> None:
        """Close the connections."""
        await self._columns.close()


def _columns_of(sealed: Any) -> tuple[bytes, bytes, str, int]:
    """The four columns of sealed credentials."""
    return sealed.encrypted, sealed.dek_wrapped, sealed.kek_id, sealed.encryption_version


def _binding(job_id: str, row: Row) -> Any:
    from tenure.vault import Binding

    return Binding(job_id, row["requester_id"], row["credential_version"])


def _sealed(row: Row) -> Any:
    from tenure.vault import Sealed

    if row["storage_creds_encrypted"] is None:
        return None
    return Sealed(
        encrypted=bytes(row["storage_creds_encrypted"]),
        dek_wrapped=bytes(row["storage_creds_dek_wrapped"]),
        kek_id=row["storage_creds_kek_id"],
        encryption_version=row["storage_creds_encryption_version"],
    )


class WebhookSecrets:
    """The signing secrets of requesters: the newest, and the one before it for a day.

    A secret is bound to its name and its requester, so a row copied to another requester does not
    open. The name has a slash, which no job id has. Opened secrets stay in memory, so that the key
    service is not called for every delivery.
    """

    def __init__(self, engine: Engine, vault: Any = None) -> None:
        self._engine = engine
        self._vault = vault
        self._opened: dict[str, Any] = {}

    async def live(self, requester_id: str) -> Sequence[Any]:
        """The live secrets, newest first, as the vault's type that logs do not show."""
        rows = await self._engine.run(INBOX, "secrets_live", requester_id=requester_id)
        return [await self._open(row) for row in rows]

    async def has(self, requester_id: str) -> bool:
        """Whether the requester has a live secret, without opening it."""
        return bool(await self._engine.run(INBOX, "secrets_live", requester_id=requester_id))

    async def renew(self, requester_id: str, seal: Seal) -> str:
        """A new secret, which cannot be read again; the one before stays live for a day."""
        # Standard base64, as the libraries for Standard Webhooks expect.
        text = SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()
        name = _NAME_PREFIX + uuid7()
        columns = _named(sealed_columns(await seal(text.encode(), name, requester_id, _VERSION)))
        await self._engine.run(
            *(INBOX, "secret_add"),
            **{"requester_id": requester_id, "name": name, "overlap_ms": _OVERLAP_MS, **columns},
        )
        return text

    async def seal_plain(self) -> int:
        """Seal the secrets that are stored unsealed; how many."""
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
            opened = await self._with_keys().open(sealed, _secret_binding(row))
            if len(self._opened) >= _OPENED_MAX:
                self._opened.clear()
            self._opened[name] = opened
        return self._opened[name]

    async def _seal(self, row: Row) -> None:
        from tenure.vault import Secret

        sealed = await self._with_keys().seal(Secret(row["secret"]), _secret_binding(row))
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
                "webhook secrets are sealed: the process that signs needs a key ring (vault.keys)",
                contract="inbox",
            )
        return self._vault


def _secret_binding(row: Row) -> Any:
    from tenure.vault import Binding

    return Binding(row["name"], row["requester_id"], _VERSION)
