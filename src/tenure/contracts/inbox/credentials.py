"""A job's sealed credentials, in the vault's own types.

The vault is a package with dependencies of its own, so it is loaded when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from tenure.core.lease import Lease
from tenure.ledger.credentials import SealedColumns
from tenure.ledger.engine import INBOX, Engine, Row
from tenure.ledger.settings import BoxSettings


class InboxCredentials:
    """What a worker reads and replaces under its lease, and a rotation moves to another key.

    A rotation moves the webhook secrets too: it sees them as rows under the names of the secrets.
    """

    def __init__(self, engine: Engine) -> None:
        self._columns = SealedColumns(engine, INBOX)

    async def read(self, lease: Lease) -> Any:
        """What is stored now; raises `LeaseLost` when the claim is not the current one."""
        row = await self._columns.read(lease)
        return _vault("credentials").StoredCredentials(
            binding=_binding(lease.job_id, row),
            sealed=_sealed(row),
            refresh_url=row["refresh_url"] or "",
            refreshes=row["credential_refresh_count"],
        )

    async def replace(self, lease: Lease, *, seen_version: int, sealed: Any) -> bool:
        """Put new columns in place and raise the version; False when it moved meanwhile."""
        return await self._columns.replace(lease, seen_version, columns_of(sealed))

    async def put(self, job_id: str, requester: str, *, seen_version: int, sealed: Any) -> bool:
        """The same for the requester, who holds no lease."""
        return await self._columns.put(job_id, requester, seen_version, columns_of(sealed))

    async def keep(self, settings: BoxSettings) -> None:
        """Note whether the queue keeps credentials of jobs that have ended."""
        await self._columns.keep(settings.queue, settings.keep_credentials)

    async def count_refresh(self, lease: Lease) -> int:
        """Add one to the job's refresh attempts and return the sum."""
        return await self._columns.count_refresh(lease)

    async def page(self, *, not_under: str, after: str, limit: int) -> Sequence[Any]:
        """Rows under another key than this one, in the order of their job ids."""
        rows = await self._columns.page(not_under=not_under, after=after, limit=limit)
        wrapped = _vault("rotation").WrappedKey
        return [
            wrapped(
                binding=_binding(row["job_id"], row),
                kek_id=row["storage_creds_kek_id"],
                dek_wrapped=bytes(row["storage_creds_dek_wrapped"]),
                encryption_version=row["storage_creds_encryption_version"],
            )
            for row in rows
        ]

    async def swap(self, pairs: Sequence[tuple[Any, Any]]) -> int:
        """Replace key id and wrapping where all is as seen; how many."""
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


def columns_of(sealed: Any) -> tuple[bytes, bytes, str, int]:
    """The four columns of sealed credentials."""
    return sealed.encrypted, sealed.dek_wrapped, sealed.kek_id, sealed.encryption_version


def _vault(module: str) -> Any:
    return importlib.import_module(f"tenure.vault.{module}")


def _binding(job_id: str, row: Row) -> Any:
    binding = _vault("envelope").Binding
    return binding(job_id, row["requester_id"], row["credential_version"])


def _sealed(row: Row) -> Any:
    if row["storage_creds_encrypted"] is None:
        return None
    return _vault("envelope").Sealed(
        encrypted=bytes(row["storage_creds_encrypted"]),
        dek_wrapped=bytes(row["storage_creds_dek_wrapped"]),
        kek_id=row["storage_creds_kek_id"],
        encryption_version=row["storage_creds_encryption_version"],
    )
