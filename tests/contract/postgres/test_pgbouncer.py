"""Queues by way of PgBouncer: no settings on its side, nothing left in a session."""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from tenure.cli.doctor import postgres_findings
from tenure.cli.project import migrated
from tenure.core.errors import ReplyLost, StoreUnreachable
from tenure.core.job import NewJob
from tenure.core.journal import SqlFormat
from tenure.core.outcome import Outcome
from tenure.core.registry import (
    journal_format,
    open_journal,
    open_ledger,
    open_part,
    open_queue,
    parse_url,
)
from tenure.pipeline.source.ranges import Read
from tenure.pipeline.source.sql_reader import SqlRangeReader
from tenure.store.postgres import Connection, Postgres
from tenure.store.postgres.address import parse_postgres_url
from tenure.store.postgres.session import Dialer, _keeps_statements
from tests.contract.adapters import Servers
from tests.postgres_topologies import PgBouncer, pgbouncer
from tests.waiting import until

ONE_SESSION = "default_pool_size = 1\n"
SAMPLES = 40


@pytest.fixture
def one_session(servers: Servers) -> Generator[PgBouncer]:
    """A pooler in transaction mode with a single session, which all clients share."""
    with pgbouncer(servers.postgres_itself(), "transaction", ONE_SESSION) as pooler:
        yield pooler


@pytest.fixture
async def schema(servers: Servers) -> AsyncGenerator[str]:
    name = f"pooled{secrets.token_hex(4)}"
    await migrated(parse_url(f"inbox+{servers.postgres_itself()}?schema={name}"))
    yield name
    connection = await asyncpg.connect(servers.postgres_itself())
    await connection.execute(f"DROP SCHEMA {name} CASCADE")
    await connection.close()


def a_job(**options: Any) -> NewJob:
    return NewJob(task="t", payload=b"{}", options=options)


@pytest.mark.parametrize("contract", ["inbox", "plane"])
@pytest.mark.parametrize("mode", ["session", "transaction"])
async def test_a_queue_works_behind_a_pooler_without_settings_for_it(
    servers: Servers, contract: str, mode: str
) -> None:
    """Migrations, submits one by one and by COPY, claims, settles, journal, counts."""
    url = f"{contract}+{servers.pgbouncer(mode).url}?schema={mode}{secrets.token_hex(4)}"
    assert await migrated(parse_url(url))
    queue, ledger, journal = open_queue(url, worker_id="w"), open_ledger(url), open_journal(url)
    try:
        await queue.submit([a_job()])
        await queue.submit([a_job() for _ in range(600)])
        leases = await queue.claim(601, wait_ms=5_000)
        while len(leases) < 601:
            leases += await queue.claim(601, wait_ms=5_000)
        await queue.extend(leases[:1])
        await queue.settle([Outcome(lease, "complete", result=b"1") for lease in leases])
        events = await journal.wait(after="", wait_ms=5_000)
        assert [event.type for event in events[:1]] == ["submit"]
        counts = await ledger.counts()
        assert sum(counts.states.values()) == 601
    finally:
        for each in (queue, ledger, journal):
            await each.close()
        database = Postgres(servers.postgres_itself(), schema="public")
        await database.script(f"DROP SCHEMA {parse_url(url).options['schema']} CASCADE")
        await database.close()


async def test_settings_and_statements_of_one_client_are_not_those_of_the_next(
    one_session: PgBouncer, schema: str
) -> None:
    """Many clients at once on one session of the server: no name of a statement collides, none
    sees the schema of another, and a foreign client finds the server's own settings."""
    clients = [Postgres(one_session.url, schema=schema) for _ in range(2)]
    clients += [Postgres(one_session.url, schema="public", pinned=False, durable=False)]
    found = "SELECT current_schema() AS schema, $1::int AS n"
    calls = [
        client.fetch(f"{found} -- {number % 7}", [number])
        for number in range(120)
        for client in clients
    ]
    answers = await asyncio.gather(*calls)
    schemas = [rows[0]["schema"] for rows in answers]
    assert schemas == [schema, schema, "public"] * 120
    foreign = await asyncpg.connect(one_session.url, statement_cache_size=0)
    async with foreign.transaction():
        shown = [
            await foreign.fetchval(f"SHOW {name}")
            for name in ("search_path", "enable_seqscan", "synchronous_commit", "plan_cache_mode")
        ]
        left = await foreign.fetch("SELECT name FROM pg_prepared_statements")
    assert shown == ['"$user", public', "on", "on", "auto"]
    assert not [row["name"] for row in left if row["name"].startswith(("tenure", "__asyncpg"))]
    await foreign.close()
    for client in clients:
        await client.close()


class HeldDialer(Dialer):
    """Its first connection is held until `gate`, before it is made ready."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.connected, self.gate = asyncio.Event(), asyncio.Event()

    async def _connect(self, *given: Any) -> Connection:
        connection = await super()._connect(*given)
        if not self.connected.is_set():
            self.connected.set()
            await self.gate.wait()
        return connection


async def test_connections_that_are_opened_at_once_all_learn_what_the_pooler_can(
    servers: Servers,
) -> None:
    """What one learns must not make another, opened before, believe that it has learnt it too."""
    address = parse_postgres_url(servers.pgbouncer("transaction").url)
    dial = HeldDialer(address, {"search_path": "public"})
    first = asyncio.create_task(dial())
    await dial.connected.wait()
    second = await dial()
    dial.gate.set()
    caches = [each._config.statement_cache_size for each in (await first, second)]
    assert caches == [200 if await _keeps_statements(second) else 0] * 2
    for each in (await first, second):
        await each.close()


async def test_an_error_in_a_shared_session_leaves_no_transaction_open(
    one_session: PgBouncer, schema: str
) -> None:
    queue = open_queue(f"inbox+{one_session.url}?schema={schema}&max_depth=1")
    await queue.close()
    database = Postgres(one_session.url, schema=schema)
    for _ in range(3):
        with pytest.raises(Exception, match="no_such_table"):
            await database.fetch("SELECT * FROM no_such_table", [])
    call = asyncio.create_task(database.fetch("SELECT pg_sleep(30)", []))
    await asyncio.sleep(0.1)  # so that it is cancelled in the middle
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(20):
        assert (await database.fetch("SELECT 1 AS one", []))[0]["one"] == 1
    await database.close()


async def starts_after_ms(url: str) -> float:
    """How long a job waits until it is claimed, under light load: the median."""
    producer, worker = open_queue(url), open_queue(url, worker_id="w")
    waited = []
    try:
        await worker.claim(1, wait_ms=1)  # connects
        for _ in range(SAMPLES):
            claim = asyncio.create_task(worker.claim(1, wait_ms=20_000))
            await asyncio.sleep(0.05)  # the pause between two jobs is the light load
            begun = time.perf_counter()
            await producer.submit([a_job()])
            leases = await claim
            waited.append((time.perf_counter() - begun) * 1000)
            await worker.settle([Outcome(lease, "complete") for lease in leases])
    finally:
        await producer.close()
        await worker.close()
    return statistics.median(waited)


async def test_without_notices_a_job_under_light_load_starts_within_a_moment(
    servers: Servers, schema: str
) -> None:
    """The polls of a reader that has notices, every 500 to 1,500 ms, would be too seldom."""
    url = f"inbox+{servers.pgbouncer('transaction').url}?schema={schema}"
    assert await starts_after_ms(url) < 100


async def test_a_worker_without_work_polls_ever_less_often(servers: Servers, schema: str) -> None:
    engine = open_part(f"inbox+{servers.pgbouncer('transaction').url}?schema={schema}", "database")
    engine._found_s["q"] = time.monotonic() - 0.1
    assert engine.poll_ms("q") <= 12.5
    engine._found_s["q"] = time.monotonic() - 10
    assert 150 <= engine.poll_ms("q") <= 260
    engine._found_s["q"] = 0.0
    assert 375 <= engine.poll_ms("q") <= 625
    await engine.close()


@pytest.mark.parametrize(
    ("mode", "option"), [("session", "pooling=session"), ("transaction", "notify_address={}")]
)
async def test_notices_arrive_in_a_session_of_its_own_and_from_a_direct_address(
    servers: Servers, schema: str, mode: str, option: str
) -> None:
    direct = servers.postgres_itself().rpartition("@")[2].partition("/")[0]
    url = f"inbox+{servers.pgbouncer(mode).url}?schema={schema}&{option.format(direct)}"
    engine, queue = open_part(url, "database"), open_queue(url)
    listener = engine.listener("inbox")
    try:
        while True:
            await listener.arm()
            if not listener._notified.is_set():  # the first says to look for earlier work
                break
        woken = asyncio.create_task(listener.wait(60_000))
        await queue.submit([a_job()])
        await asyncio.wait_for(woken, 20)
    finally:
        await listener.close()
        await engine.close()
        await queue.close()


async def test_the_pipeline_reads_a_journal_and_notes_its_position_through_a_pooler(
    servers: Servers, schema: str, tmp_path: Path
) -> None:
    """By ADBC, which is libpq: it gets the options that it knows, and the login of now."""
    pooled = urlsplit(servers.pgbouncer("transaction").url)
    (tmp_path / "password").write_text(pooled.password or "")
    store = pooled._replace(netloc=f"{pooled.username}@127.0.0.1:{pooled.port}").geturl()
    own = f"password_file={tmp_path}/password&idle_s=9&pooling=auto"
    url = f"inbox+{store}?schema={schema}&{own}"
    queue = open_queue(url)
    await queue.submit([a_job() for _ in range(600)])
    await queue.close()
    fmt = journal_format(url)
    assert isinstance(fmt, SqlFormat)
    reader = SqlRangeReader(fmt, "journal")
    head = await asyncio.to_thread(reader.head)
    batches = await asyncio.to_thread(lambda: list(reader.read("", head.last, Read())))
    await asyncio.to_thread(reader.captured, head.last, "lake")
    reader.close()
    assert sum(batch.num_rows for batch in batches) == 600
    database = Postgres(servers.postgres_itself(), schema=schema)
    (note,) = await database.fetch("SELECT name, position FROM journal_readers", [])
    await database.close()
    assert (note["name"], note["position"]) == ("lake", int(head.last))


async def test_doctor_says_that_a_pooler_shares_the_sessions(servers: Servers) -> None:
    async def sessions(url: str) -> str:
        findings = await postgres_findings(url)
        return next(each.level for each in findings if each.check == "sessions")

    pooled = servers.pgbouncer("transaction").url
    direct = servers.postgres_itself().rpartition("@")[2].partition("/")[0]
    assert await sessions(servers.postgres_itself()) == "ok"
    assert await sessions(pooled) == "note"
    assert await sessions(f"{pooled}?notify_address={direct}") == "ok"


async def test_a_pooler_that_starts_again_is_found_again(servers: Servers, schema: str) -> None:
    with pgbouncer(servers.postgres_itself(), "transaction") as pooler:
        queue = open_queue(f"inbox+{pooler.url}?schema={schema}")
        await queue.submit([a_job()])
        pooler.end()

        async def submits() -> bool:
            try:
                return bool(await queue.submit([a_job()]))
            except (ReplyLost, StoreUnreachable):
                return False

        assert not await submits()
        pooler.start()
        await until(submits)
        await queue.close()
