"""A small SQLite store of sealed credentials, as the inbox contract keeps them."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

from tenure.vault import Binding, Sealed, WrappedKey

SCHEMA = """
create table if not exists creds (
  job_id text primary key,
  requester_id text not null,
  credential_version integer not null,
  storage_creds_encrypted blob not null,
  storage_creds_dek_wrapped blob not null,
  storage_creds_kek_id text not null,
  storage_creds_encryption_version integer not null
) strict
"""
SWAP = """
update creds set storage_creds_dek_wrapped = ?, storage_creds_kek_id = ?
where job_id = ? and credential_version = ? and storage_creds_kek_id = ?
  and storage_creds_dek_wrapped = ?
"""


class Rows:
    """Satisfies `tenure.vault.WrappedKeys`; each call is one transaction."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = off")
        self._db.execute(SCHEMA)

    async def close(self) -> None:
        self._db.close()

    def put(self, binding: Binding, sealed: Sealed) -> None:
        row = (binding.job_id, binding.requester_id, binding.credential_version)
        sealed_row = (sealed.encrypted, sealed.dek_wrapped, sealed.kek_id, 1)
        self._db.execute(
            "insert or replace into creds values (?, ?, ?, ?, ?, ?, ?)", (*row, *sealed_row)
        )

    def read(self, job_id: str) -> tuple[Binding, Sealed]:
        row = self._db.execute("select * from creds where job_id = ?", (job_id,)).fetchone()
        return Binding(*row[:3]), Sealed(*row[3:])

    def ciphertexts(self) -> dict[str, bytes]:
        return dict(self._db.execute("select job_id, storage_creds_encrypted from creds"))

    async def page(self, *, not_under: str, after: str, limit: int) -> Sequence[WrappedKey]:
        rows = self._db.execute(
            "select job_id, requester_id, credential_version, storage_creds_kek_id,"
            " storage_creds_dek_wrapped, storage_creds_encryption_version from creds"
            " where storage_creds_kek_id != ? and job_id > ? order by job_id limit ?",
            (not_under, after, limit),
        )
        return [WrappedKey(Binding(*row[:3]), *row[3:]) for row in rows]

    async def swap(self, pairs: Sequence[tuple[WrappedKey, WrappedKey]]) -> int:
        self._db.execute("begin immediate")
        done = sum(
            self._db.execute(
                SWAP,
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
        self._db.execute("commit")
        return done

    async def counts(self) -> Mapping[str, int]:
        return dict(
            self._db.execute(
                "select storage_creds_kek_id, count(*) from creds group by 1"
            ).fetchall()
        )
