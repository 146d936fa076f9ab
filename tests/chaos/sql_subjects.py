"""The `inbox` contract under chaos: on a SQLite file, and on a PostgreSQL that is killed."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tenure.contracts.inbox import MACHINE as INBOX
from tenure.sql.schema import PostgresMigrations, migrate
from tenure.store.embedded import EmbeddedPostgres
from tenure.store.postgres import Postgres
from tenure.store.sqlite import LOCK_SUFFIX, NEXT_SUFFIX
from tests.chaos.residue import unfinished
from tests.chaos.subject import Fsync, Subject


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

    def claims_until_lost(self, lost_max: int) -> int:
        return lost_max

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

    @contextmanager
    def all_outside(self) -> Iterator[None]:
        """Holds what a writer takes, the place in front and the lock itself."""
        with ExitStack() as held:
            for end in (NEXT_SUFFIX, LOCK_SUFFIX):
                file = held.enter_context(self._file.with_name(self._file.name + end).open("ab"))
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    async def residue(self) -> dict[str, int]:
        return await unfinished(self.url(), INBOX)


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
        database = Postgres(self._server.url, schema="tenure")
        await migrate(PostgresMigrations(database), "postgres")
        await database.close()

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.stop)

    def all_outside(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def kill(self) -> None:
        """An immediate shutdown: what was acknowledged is in the log, and is recovered from it."""
        await asyncio.to_thread(self._server.stop_immediately)


SQL_SUBJECTS: dict[str, Callable[..., Subject]] = {
    "inbox": SqliteInboxSubject,
    "inbox_postgres": PostgresInboxSubject,
}
