"""The sealed credentials of jobs, as rows: read and replaced under the lease, rewrapped by id.

What is sealed stays sealed here; who opens it, and what it is bound to, is the vault's matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenure.core.errors import LeaseLost
from tenure.core.job import short_hash
from tenure.core.lease import Lease
from tenure.ledger.engine import Engine, Row

Columns = tuple[bytes, bytes, str, int]
"""Encrypted, wrapped data key, id of the wrapping key, encryption version."""


class SealedColumns:
    """The credential columns of one box."""

    def __init__(self, engine: Engine, table: str) -> None:
        self._engine = engine
        self._table = table

    async def read(self, lease: Lease) -> Row:
        """The columns of a job whose lease is held; raises `LeaseLost` else."""
        rows = await self._engine.run(self._table, "creds_read", **_proof(lease))
        if not rows:
            raise LeaseLost(lease.job_id)
        return rows[0]

    async def replace(self, lease: Lease, seen_version: int, columns: Columns) -> bool:
        """Put newer columns in place and raise the version; False when it is not the one seen."""
        rows = await self._engine.run(
            self._table,
            "creds_replace",
            **_proof(lease),
            seen_version=seen_version,
            **_named(columns),
        )
        if not rows[0]["changed"]:
            await self.read(lease)  # a lease that is lost is told apart from a version that moved
        return bool(rows[0]["changed"])

    async def put(
        self, job_id: str, requester_id: str, seen_version: int, columns: Columns
    ) -> bool:
        """The same for the requester of an unfinished job."""
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
        """Note whether a queue keeps the credentials of jobs that have ended."""
        await self._engine.run(self._table, "creds_keep", queue=queue, kept=kept)

    async def count_refresh(self, lease: Lease) -> int:
        """Count a refresh of the job whose lease is held; the sum."""
        rows = await self._engine.run(self._table, "creds_count", **_proof(lease))
        if not rows:
            raise LeaseLost(lease.job_id)
        return int(rows[0]["refreshes"])

    async def page(self, *, not_under: str, after: str, limit: int) -> Sequence[Row]:
        """Wrapped keys under another key than this one, by job id."""
        return await self._engine.run(
            self._table, "creds_page", kek_id=not_under, after=after, count=limit
        )

    async def swap(self, rows: Sequence[tuple[str, int, str, bytes, str, bytes]]) -> int:
        """Move wrapped keys where version, key id and wrapping are as seen."""
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
    return {
        "job_id": lease.job_id,
        "fence": lease.fence,
        "token_h": short_hash(lease.token.encode()),
    }


def _named(columns: Columns) -> dict[str, Any]:
    names = ("encrypted", "dek_wrapped", "kek_id", "encryption_version")
    return dict(zip(names, columns, strict=True))
