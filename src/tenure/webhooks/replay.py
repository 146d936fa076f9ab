"""Nonces already seen, for receivers: in memory for one process, in SQLite for several."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import OrderedDict
from importlib import resources
from pathlib import Path
from typing import Protocol

from tenure.store.files import private_database

_KEPT_MAX = 1_000_000


class NonceStore(Protocol):
    """Remembers nonces. One `SET nonce 1 NX EX keep_s` in Redis would do as well."""

    async def take(self, nonce: str, *, now_s: float, keep_s: float) -> bool:
        """True for the first caller with this nonce, and False for all others within `keep_s`."""


class MemoryNonces:
    """For a receiver of one process: what it saw is forgotten when it ends."""

    def __init__(self) -> None:
        self._until: OrderedDict[str, float] = OrderedDict()

    async def take(self, nonce: str, *, now_s: float, keep_s: float) -> bool:
        while self._until:
            oldest, until = next(iter(self._until.items()))
            if until > now_s and len(self._until) < _KEPT_MAX:
                break  # a flood of genuine deliveries costs old nonces, never the memory
            del self._until[oldest]
        if nonce in self._until:
            return False
        self._until[nonce] = now_s + keep_s
        return True


class SqliteNonces:
    """For receivers of several processes on one machine, and across restarts."""

    def __init__(self, path: Path | str) -> None:
        private_database(Path(path))
        self._db = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = normal")
        self._db.executescript(_sql("create_nonces"))
        self._forget, self._insert = _sql("forget_nonces"), _sql("take_nonce")
        self._turn = asyncio.Lock()

    async def take(self, nonce: str, *, now_s: float, keep_s: float) -> bool:
        async with self._turn:
            return await asyncio.to_thread(self._take, nonce, now_s, keep_s)

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def _take(self, nonce: str, now_s: float, keep_s: float) -> bool:
        self._db.execute("begin immediate")
        try:
            self._db.execute(self._forget, {"now_s": now_s})
            made = self._db.execute(self._insert, {"nonce": nonce, "until_s": now_s + keep_s})
        except BaseException:
            self._db.execute("rollback")
            raise
        self._db.execute("commit")
        return made.rowcount == 1


def _sql(name: str) -> str:
    return resources.files("tenure.webhooks").joinpath("sql", f"{name}.sql").read_text()
