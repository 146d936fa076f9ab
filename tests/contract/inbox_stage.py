"""The `inbox` contract for the conformance suite: on SQLite, and on PostgreSQL through a wire that
can lose an answer."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import asyncpg

from tenure.contracts.inbox import open_parts
from tenure.contracts.inbox.queue import InboxQueue
from tenure.core.errors import ReplyLost
from tenure.core.registry import open_queue, parse_url
from tenure.core.seam import Queue
from tenure.sql.schema import PostgresMigrations, migrate
from tenure.sql.sqlite_engine import SqliteEngine
from tenure.store.postgres import Postgres
from tests.contract.postgres_proxy import PostgresProxy
from tests.contract.stages import Close, StoredStage, Words, query_of

WORDS = Words("queued", "claimed", "succeeded", "dead_letter", "dead_letter")
_unique = itertools.count(1)


InboxStage: TypeAlias = StoredStage
"""One ledger of its own: a file, or a schema."""


class LosingEngine:
    """Runs every operation, and loses the answer of the next one when told."""

    def __init__(self, engine: SqliteEngine) -> None:
        self._engine = engine
        self._loses = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def lose(self) -> None:
        self._loses = True

    async def run(
        self, table: str, operation: str, batch: Sequence[Sequence[Any]] = (), /, **params: Any
    ) -> Any:
        answer = await self._engine.run(table, operation, batch, **params)
        if self._loses:
            self._loses = False
            raise ReplyLost(f"the answer to {operation} was lost")
        return answer


class SqliteInboxAdapter:
    """Every stage is a file of its own."""

    name = "inbox"
    cannot: Mapping[str, str] = {}

    async def open(self, **options: int) -> InboxStage:
        folder = tempfile.TemporaryDirectory(prefix="tenure-inbox-")
        lease_ms = options.setdefault("lease_ms", 300)
        query = query_of({**options, "synchronous": "normal"})
        url = f"inbox+sqlite:///{folder.name}/jobs.db?{query}"

        async def lossy(worker_id: str) -> tuple[Queue, Callable[[], None], Close]:
            engine, read = open_parts(parse_url(url))
            losing = LosingEngine(engine)  # type: ignore[arg-type]
            queue = InboxQueue(losing, read, worker_id=worker_id)
            return queue, losing.lose, _nothing

        async def clean() -> None:
            folder.cleanup()

        return InboxStage(url, lease_ms, self.cannot, WORDS, lossy, clean)


async def _nothing() -> None:
    pass


class PostgresInboxAdapter:
    """Every stage is a queue of its own in one schema of a private server."""

    name = "inbox_postgres"
    cannot: Mapping[str, str] = {}
    _migrated: ClassVar[set[str]] = set()

    def __init__(self, server_url: Callable[[], str]) -> None:
        self._server_url = server_url

    async def open(self, **options: int) -> InboxStage:
        server, schema = self._server_url(), f"suite_{os.getpid()}"
        if server not in self._migrated:
            await migrated(server, schema)
            self._migrated.add(server)
        lease_ms = options.setdefault("lease_ms", 500)
        own = {"schema": schema, "synchronous": "normal", "queue": f"stage-{next(_unique)}"}
        query = query_of({**options, **own})

        async def lossy(worker_id: str) -> tuple[Queue, Callable[[], None], Close]:
            proxy = await PostgresProxy(server).start()
            queue = open_queue(f"inbox+{proxy.url}?{query}", worker_id=worker_id)
            return queue, proxy.drop_reply, proxy.stop

        async def clean() -> None:
            # A job's id is unique in the schema, which the next test shares.
            connection = await asyncpg.connect(server, timeout=20, statement_cache_size=0)
            async with connection.transaction():  # a pooler gives it one session
                for table in ("inbox_jobs", "pruned_jobs"):
                    await connection.execute(
                        f"DELETE FROM {schema}.{table} WHERE queue = $1", own["queue"], timeout=20
                    )
            await connection.close()

        return InboxStage(f"inbox+{server}?{query}", lease_ms, self.cannot, WORDS, lossy, clean)


class PgbouncerInboxAdapter(PostgresInboxAdapter):
    """The same by way of a PgBouncer in transaction mode: what of the suite depends on sessions,
    transactions and notices. With `TENURE_POSTGRES_TOPOLOGY=pgbouncer` all of it is run."""

    name = "inbox_pgbouncer"
    modules = frozenset({"test_batch", "test_claim", "test_fence", "test_lost_reply", "test_pause"})


async def migrated(server: str, schema: str) -> None:
    """Make a schema with the ledger's tables."""
    database = Postgres(server, schema=schema)
    await migrate(PostgresMigrations(database), "postgres")
    await database.close()
