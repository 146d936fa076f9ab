"""The `plane` contract for the chaos herd: PostgreSQL is the truth, Redis carries the messages.

Both are killed, in turns; Redis comes back empty every time. Workers know only the address of the
gateway, which is killed as well.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tenure.contracts.plane import MACHINE as PLANE
from tenure.sql.schema import PostgresMigrations, migrate
from tenure.store.embedded import EmbeddedPostgres, EmbeddedRedis
from tenure.store.postgres import Postgres
from tests.chaos.residue import unfinished
from tests.ports import free_port

SCHEMA = "tenure"


class PlaneSubject:
    """A plane on a PostgreSQL and a Redis of its own."""

    name = "plane"
    async_task = "chat"
    thread_task = "tool"
    retries: Mapping[str, Any] = {"max_attempts": 20}
    jobs_path = "/v1/plane/jobs"
    gateway_returns_ms = 6_000  # nobody can claim before; a fresh interpreter on a busy machine

    def __init__(self, folder: Path, *, fsync: Any = "everysec", **options: int) -> None:
        self.fsync = fsync
        self.gateway_port = free_port()
        self._postgres = EmbeddedPostgres()
        self._redis_data = folder / "redis"
        self._redis = EmbeddedRedis(self._redis_data, appendfsync="everysec")
        self._kills = 0
        self._options = {"retry_delay_ms": 100, "max_attempts": 50, "resend_ms": 1_000, **options}

    def claims_until_lost(self, lost_max: int) -> int:
        return lost_max

    @property
    def store_url(self) -> str:
        return self._postgres.url

    @property
    def redis_url(self) -> str:
        """Where the messages travel."""
        return self._redis.url

    def url(self, store_url: str = "") -> str:
        """The plane itself."""
        store = store_url or self._postgres.url
        query = "&".join(f"{name}={value}" for name, value in self._options.items())
        joint = "&" if "?" in store else "?"
        return f"plane+{store}{joint}{query}&schema={SCHEMA}&redis={self._redis.url}"

    def worker_url(self) -> str:
        """All that a worker knows."""
        return f"plane+http://127.0.0.1:{self.gateway_port}"

    async def start(self) -> None:
        if self._postgres.pid is None:
            await asyncio.to_thread(self._postgres.start)
            database = Postgres(self._postgres.url, schema=SCHEMA)
            await migrate(PostgresMigrations(database), "postgres")
            await database.close()
        if self._redis.pid is None:
            await asyncio.to_thread(self._redis.start)

    async def stop(self) -> None:
        await asyncio.to_thread(self._postgres.stop)
        await asyncio.to_thread(self._redis.stop)

    async def warm(self) -> None:
        """Nothing to know before."""

    async def kill(self) -> None:
        """In turns: an immediate end of PostgreSQL, and a Redis that forgets everything."""
        self._kills += 1
        if self._kills % 2:
            await asyncio.to_thread(self._postgres.stop_immediately)
            return
        await asyncio.to_thread(self._redis.kill)
        for path in self._redis_data.glob("appendonly*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    async def wipe(self) -> None:
        raise AssertionError("the truth of a plane is not emptied")

    def verb(self, command: Sequence[bytes]) -> str:
        return ""

    def all_outside(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def residue(self) -> dict[str, int]:
        return await unfinished(self.url(), PLANE)
