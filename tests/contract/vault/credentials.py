"""A small SQLite store of one job's sealed credentials, fenced, as the inbox contract has it."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tenure.core.errors import LeaseLost
from tenure.core.lease import Lease
from tenure.vault import Binding, Sealed, Secret, StoredCredentials, Vault, WrappedKey

SCHEMA = """
create table if not exists jobs (
  job_id text primary key,
  requester_id text not null,
  claim_version integer not null,
  credential_version integer not null,
  refreshes integer not null default 0,
  refresh_url text not null,
  encrypted blob, dek_wrapped blob, kek_id text, encryption_version integer
) strict
"""
FENCE = "job_id = ? and claim_version = ?"


class Credentials:
    """Satisfies `CredentialStore`, and `WrappedKeys` for rotations."""

    def __init__(self, path: Path | str) -> None:
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._db.execute(SCHEMA)
        self.reads = 0

    async def close(self) -> None:
        self._db.close()

    async def add(
        self, vault: Vault, job_id: str, requester: str, plain: Any, refresh_url: str = ""
    ) -> None:
        sealed = None
        if plain is not None:
            secret = Secret(msgspec.json.encode(plain))
            sealed = await vault.seal(secret, Binding(job_id, requester, 1))
        columns = (
            (sealed.encrypted, sealed.dek_wrapped, sealed.kek_id, 1) if sealed else (None,) * 4
        )
        self._db.execute(
            "insert into jobs values (?, ?, 1, 1, 0, ?, ?, ?, ?, ?)",
            (job_id, requester, refresh_url, *columns),
        )

    async def update(self, vault: Vault, job_id: str, plain: Any) -> int:
        """What the requester's API call does."""
        requester, version = self._db.execute(
            "select requester_id, credential_version from jobs where job_id = ?", (job_id,)
        ).fetchone()
        bound = Binding(job_id, requester, version + 1)
        sealed = await vault.seal(Secret(msgspec.json.encode(plain)), bound)
        return self._put(sealed, "job_id = ? and credential_version = ?", (job_id, version))

    def reclaim(self, job_id: str) -> None:
        self._db.execute(
            "update jobs set claim_version = claim_version + 1 where job_id = ?", (job_id,)
        )

    def row(self, job_id: str) -> tuple[Any, ...]:
        found = self._db.execute("select * from jobs where job_id = ?", (job_id,)).fetchone()
        assert isinstance(found, tuple)
        return found

    async def read(self, lease: Lease) -> StoredCredentials:
        self.reads += 1
        row = self._db.execute(
            f"select * from jobs where {FENCE}", (lease.job_id, lease.fence)
        ).fetchone()
        if row is None:
            raise LeaseLost(lease.job_id)
        bound = Binding(row[0], row[1], row[3])
        sealed = Sealed(*row[6:]) if row[6] is not None else None
        return StoredCredentials(bound, sealed, refresh_url=row[5], refreshes=row[4])

    async def replace(self, lease: Lease, *, seen_version: int, sealed: Sealed) -> bool:
        where = f"{FENCE} and credential_version = ?"
        if self._put(sealed, where, (lease.job_id, lease.fence, seen_version)):
            return True
        await self.read(lease)  # LeaseLost where that is the reason
        return False

    async def count_refresh(self, lease: Lease) -> int:
        row = self._db.execute(
            f"update jobs set refreshes = refreshes + 1 where {FENCE} returning refreshes",
            (lease.job_id, lease.fence),
        ).fetchone()
        if row is None:
            raise LeaseLost(lease.job_id)
        return int(row[0])

    async def page(self, *, not_under: str, after: str, limit: int) -> Sequence[WrappedKey]:
        rows = self._db.execute(
            "select job_id, requester_id, credential_version, kek_id, dek_wrapped,"
            " encryption_version from jobs where kek_id != ? and job_id > ?"
            " order by job_id limit ?",
            (not_under, after, limit),
        )
        return [WrappedKey(Binding(*row[:3]), *row[3:]) for row in rows]

    async def swap(self, pairs: Sequence[tuple[WrappedKey, WrappedKey]]) -> int:
        return sum(
            self._db.execute(
                "update jobs set dek_wrapped = ?, kek_id = ? where job_id = ?"
                " and credential_version = ? and kek_id = ? and dek_wrapped = ?",
                (
                    new.dek_wrapped,
                    new.kek_id,
                    old.binding.job_id,
                    old.binding.credential_version,
                    old.kek_id,
                    old.dek_wrapped,
                ),
            ).rowcount
            for old, new in pairs
        )

    async def counts(self) -> Mapping[str, int]:
        return dict(self._db.execute("select kek_id, count(*) from jobs group by 1").fetchall())

    def _put(self, sealed: Sealed, where: str, values: tuple[Any, ...]) -> int:
        return self._db.execute(
            "update jobs set encrypted = ?, dek_wrapped = ?, kek_id = ?, encryption_version = ?,"
            f" credential_version = credential_version + 1 where {where}",
            (sealed.encrypted, sealed.dek_wrapped, sealed.kek_id, 1, *values),
        ).rowcount
