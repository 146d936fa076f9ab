"""What the chaos harness must know of a contract: its store, its URL, its HTTP side, its traces.

A new contract adds one class here and its name to `SUBJECTS`; everything else is the same for all.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from leasehold.contracts.streams.options import GROUP, keys
from leasehold.contracts.streams.queue import SCRIPTS
from leasehold.core.opening import open_ledger
from leasehold.ledger.migrating import PostgresMigrations, migrate
from leasehold.store.embedded import EmbeddedPostgres, EmbeddedRedis
from leasehold.store.postgres import Postgres
from leasehold.store.redis import Redis
from tests.chaos.effects import now_ms

Fsync = Literal["everysec", "always"]
VERBS = ("submit", "claim", "extend", "report", "settle")


class Subject(Protocol):
    """One contract on a private store that may be killed."""

    name: str
    fsync: Fsync
    async_task: str  # a task name that the contract takes, for handlers in the loop
    thread_task: str  # ... and for the handler in a thread
    retries: Mapping[str, Any]  # options of a job that may fail and be tried again
    jobs_path: str  # where its gateway takes jobs

    async def start(self) -> None:
        """Start the store, or start it again on the same data and address."""

    async def stop(self) -> None:
        """End the store and let go of its data."""

    async def warm(self) -> None:
        """Make the store know what it will be asked, so that a lost reply is one to a real call."""

    async def kill(self) -> None:
        """kill -9 of the store."""

    async def wipe(self) -> None:
        """Remove the data of a killed store."""

    def url(self, store_url: str = "") -> str:
        """The queue URL; `store_url` leads through a proxy."""

    @property
    def store_url(self) -> str:
        """Where the store listens, for a proxy."""

    def verb(self, command: Sequence[bytes]) -> str:
        """Which verb of the seam a command on the wire serves; "" for none."""

    async def residue(self) -> dict[str, int]:
        """What must be empty when all is done."""


class StreamsSubject:
    """The `streams` contract on a Redis with an append-only file."""

    name = "streams"
    async_task = "chat"
    thread_task = "tool"
    retries: Mapping[str, Any] = {"max_attempts": 20}
    jobs_path = "/v1/jobs"

    def __init__(self, folder: Path, *, fsync: Fsync = "everysec", **options: int) -> None:
        self.fsync: Fsync = fsync
        self._data = folder / "redis"
        self._server = EmbeddedRedis(self._data, appendfsync=fsync)
        self._options = {"retry_delay_ms": 100, **options}
        self._verbs = {script.sha.encode(): name for name, script in SCRIPTS.items()}
        self._verbs |= {script.source.encode(): name for name, script in SCRIPTS.items()}

    @property
    def store_url(self) -> str:
        return self._server.url

    def url(self, store_url: str = "") -> str:
        query = "&".join(f"{name}={value}" for name, value in self._options.items())
        return f"streams+{store_url or self._server.url}?{query}"

    async def start(self) -> None:
        await asyncio.to_thread(self._server.start)

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.stop)

    async def warm(self) -> None:
        async with self._client() as redis:
            for script in SCRIPTS.values():
                await redis.call("SCRIPT", "LOAD", script.source)

    async def kill(self) -> None:
        """With `everysec`, at a moment when no fsync is under way.

        While one is, Redis keeps writes that it has already acknowledged in its own memory (for up
        to two seconds); to kill it then is to cut the power, and what that may cost is stated for
        the contract. At every other moment an acknowledged write is the kernel's, and must survive.
        """
        if self.fsync == "everysec":
            await self._until_no_fsync()
        await asyncio.to_thread(self._server.kill)

    async def wipe(self) -> None:
        for path in self._data.glob("appendonly*"):  # a folder since Redis 7, a file before
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def verb(self, command: Sequence[bytes]) -> str:
        if len(command) < 2 or command[0].upper() not in (b"EVALSHA", b"EVAL"):
            return ""
        verb = self._verbs.get(command[1], "")
        return verb if verb in VERBS else ""

    async def residue(self) -> dict[str, int]:
        stream, _, delayed, *_ = keys("")
        async with self._client() as redis:
            pending = await redis.call("XPENDING", stream, GROUP)
            return {
                "stream entries": await redis.call("XLEN", stream),
                "pending entries": pending[0],
                "delayed jobs": await redis.call("ZCARD", delayed),
            }

    async def _until_no_fsync(self) -> None:
        """An fsync begins with the first write of a second; a good way into it, it is over."""
        async with self._client() as redis:
            while True:
                info = await redis.call("INFO", "persistence")
                assert b"aof_pending_bio_fsync" in info, "the server has no append-only file"
                if b"aof_pending_bio_fsync:0" in info and 300 <= now_ms() % 1000 <= 900:
                    return
                await asyncio.sleep(0.01)  # the server tells nobody when an fsync ends

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Redis]:
        redis = Redis(self._server.url, name="chaos")
        try:
            yield redis
        finally:
            await redis.close()


class SqliteInboxSubject:
    """The `inbox` contract in a SQLite file: the store is the processes themselves."""

    name = "inbox"
    async_task = "chat"
    thread_task = "tool"
    retries: Mapping[str, Any] = {"max_attempts": 20}
    jobs_path = ""

    def __init__(self, folder: Path, *, fsync: Fsync = "everysec", **options: int) -> None:
        self.fsync: Fsync = fsync
        self._file = folder / "jobs.db"
        synchronous = "full" if fsync == "always" else "normal"
        self._options = {"retry_delay_ms": 100, "synchronous": synchronous, **options}

    @property
    def store_url(self) -> str:
        return f"sqlite:///{self._file}"

    def url(self, store_url: str = "") -> str:
        query = "&".join(f"{name}={value}" for name, value in self._options.items())
        return f"inbox+{store_url or self.store_url}?max_attempts=50&{query}"

    async def start(self) -> None:
        await self.residue()  # makes the tables

    async def stop(self) -> None:
        """It ends with its last process."""

    async def warm(self) -> None:
        """Nothing to know before."""

    async def kill(self) -> None:
        raise AssertionError("a file cannot be killed")

    async def wipe(self) -> None:
        raise AssertionError("a file is not emptied under its readers")

    def verb(self, command: Sequence[bytes]) -> str:
        return ""

    async def residue(self) -> dict[str, int]:
        ledger = open_ledger(self.url())
        try:
            states = (await ledger.counts()).states
        finally:
            await ledger.close()
        unfinished = ("queued", "claimed", "fetching", "processing", "uploading", "failed")
        return {"unfinished jobs": sum(states[name] for name in unfinished)}


class PostgresInboxSubject(SqliteInboxSubject):
    """The same on a PostgreSQL that is killed and started again."""

    name = "inbox_postgres"

    def __init__(self, folder: Path, *, fsync: Fsync = "everysec", **options: int) -> None:
        super().__init__(folder, fsync=fsync, **options)
        folder.chmod(0o755)  # the server becomes another user where it is started by root
        self._server = EmbeddedPostgres()

    @property
    def store_url(self) -> str:
        return self._server.url

    async def start(self) -> None:
        await asyncio.to_thread(self._server.start)
        database = Postgres(self._server.url, schema="leasehold")
        await migrate(PostgresMigrations(database), "postgres")
        await database.close()

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.stop)

    async def kill(self) -> None:
        """An immediate shutdown: what was acknowledged is in the log, and is recovered from it."""
        await asyncio.to_thread(self._server.stop_immediately)


SUBJECTS: dict[str, Any] = {
    "streams": StreamsSubject,
    "inbox": SqliteInboxSubject,
    "inbox_postgres": PostgresInboxSubject,
}
