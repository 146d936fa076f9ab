"""Every test here runs on both engines: a SQLite file, and a queue in a PostgreSQL schema."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest

from tenure.core.job import JobRecord
from tenure.core.journal import JournalEvent
from tenure.core.registry import open_journal, open_ledger, open_queue
from tenure.core.seam import Queue
from tenure.sql.sql_ledger import SqlLedger
from tests.contract.adapters import Servers
from tests.contract.conftest import judge
from tests.contract.inbox_stage import InboxStage, PostgresInboxAdapter, SqliteInboxAdapter

ENGINES = ("sqlite", "postgres")


class RawSql(Protocol):
    """Somebody who writes to the tables with a client of their own."""

    async def __call__(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run one statement, with `?` for values; its rows."""


@pytest.fixture(params=ENGINES)
async def inbox(request: pytest.FixtureRequest, servers: Servers) -> AsyncGenerator[InboxStage]:
    marks = list(request.node.iter_markers("options"))[::-1]
    options = {name: value for mark in marks for name, value in mark.kwargs.items()}
    adapter = (
        SqliteInboxAdapter()
        if request.param == "sqlite"
        else PostgresInboxAdapter(servers.postgres)
    )
    stage = await adapter.open(**options)
    try:
        yield stage
        if request.node.get_closest_marker("raw_writes") is None:
            await judge(stage)
    finally:
        await stage.close()


@pytest.fixture
async def sql(inbox: InboxStage) -> AsyncGenerator[RawSql]:
    parts = urlsplit(inbox.url.removeprefix("inbox+"))
    if parts.scheme == "sqlite":
        file = sqlite3.connect(parts.path[1:], isolation_level=None, timeout=10)

        async def on_file(statement: str, *values: Any) -> list[tuple[Any, ...]]:
            return file.execute(statement, values).fetchall()

        yield on_file
        file.close()
        return
    schema = parse_qs(parts.query)["schema"][0]
    server = parts._replace(query="").geturl()
    connection = await asyncpg.connect(server, server_settings={"search_path": schema})

    async def on_server(statement: str, *values: Any) -> list[tuple[Any, ...]]:
        pieces = statement.split("?")
        numbered = "".join(f"{piece}${at}" for at, piece in enumerate(pieces[:-1], 1)) + pieces[-1]
        return [tuple(row) for row in await connection.fetch(numbered, *values)]

    yield on_server
    await connection.close()


class Outbox:
    """The second queue of the same stage."""

    def __init__(self, stage: InboxStage) -> None:
        url = f"{stage.url}&box=outbox"
        self.queue: Queue = open_queue(url, worker_id="deliverer")
        self.ledger: SqlLedger = open_ledger(url)  # type: ignore[assignment]
        self.journal = open_journal(url)

    async def rows(self) -> Sequence[JobRecord]:
        from tenure.core.seam import Query

        return (await self.ledger.find(Query(limit=1000))).jobs[::-1]

    async def history(self) -> list[JournalEvent]:
        return await self.journal.read(limit=10_000)

    async def close(self) -> None:
        for part in (self.queue, self.ledger, self.journal):
            await part.close()


@pytest.fixture
async def outbox(inbox: InboxStage) -> AsyncGenerator[Outbox]:
    box = Outbox(inbox)
    try:
        yield box
    finally:
        await box.close()
