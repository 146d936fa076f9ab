"""How many connections to PostgreSQL a worker has: few, shared by all it does, closed in time."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import traceback
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from tenure.cli.project import migrated
from tenure.core.errors import ServerError
from tenure.core.job import NewJob
from tenure.core.registry import open_ledger, open_part, open_queue, parse_url
from tenure.store.postgres import Connection, Postgres
from tenure.store.postgres.session import Pool, release_pool, shared_pool
from tests.contract.adapters import Servers
from tests.waiting import until

APP = """
import asyncio
from tenure import task
@task("quick")
async def quick(job): return None
@task("slow")
async def slow(job): await asyncio.sleep(3)
@task("webhook")
async def webhook(job): return None
"""
IDLE_MAX, BUSY_MAX = 3, 4
TOLD = {"status_webhook_url": "https://receiver.example/hook"}


class Base:
    """A schema of its own, and who is connected to it by a name."""

    def __init__(self, server: str, watcher: asyncpg.Connection) -> None:  # type: ignore[type-arg]
        self.name = f"c{secrets.token_hex(5)}"
        self.server = server
        self._watcher = watcher

    def url(self, **options: object) -> str:
        options = {"schema": self.name, "lease_ms": 1_500, **options}
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"inbox+{self.server}{'&' if '?' in self.server else '?'}{query}"

    async def connected(self, name: str) -> int:
        count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1"
        return int(await self._watcher.fetchval(count, name))


@pytest.fixture
async def base(servers: Servers) -> AsyncGenerator[Base]:
    watcher = await asyncpg.connect(servers.postgres())
    found = Base(servers.postgres(), watcher)
    await migrated(parse_url(found.url()))
    yield found
    await watcher.close()


@asynccontextmanager
async def worker(base: Base, folder: Path, name: str) -> AsyncGenerator[None]:
    """A process that serves an inbox and its outbox."""
    (folder / "app.py").write_text(APP)
    url = base.url(application_name=name)
    command = [sys.executable, "-m", "tenure.cli", "worker", "app.py", "--log-level", "error"]
    command += ["--queue", url, "--queue", f"{url}&box=outbox", "--concurrency", "50"]
    process = subprocess.Popen(command, cwd=folder)
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def test_a_worker_has_few_connections_idle_and_busy(base: Base, tmp_path: Path) -> None:
    name = f"w{secrets.token_hex(4)}"
    queue, ledger = open_queue(base.url()), open_ledger(base.url())
    outbox = open_ledger(base.url(box="outbox"))
    async with worker(base, tmp_path, name):

        async def is_there() -> bool:
            return (await outbox.counts()).workers == 1

        await until(is_there, within_s=60)
        idle = []
        for _ in range(50):
            idle.append(await base.connected(name))
            await asyncio.sleep(0.04)  # it is idleness that is looked at
        assert 1 <= max(idle) <= IDLE_MAX
        slow = [NewJob(task="slow", payload=b"{}", options=TOLD)] * 10
        await queue.submit([*slow, *[NewJob(task="quick", payload=b"{}", options=TOLD)] * 2_000])
        busy = before = 0

        async def all_done() -> bool:
            # Twice in a row: the server still lists for a moment a connection that was closed.
            nonlocal busy, before
            now = await base.connected(name)
            busy, before = max(busy, min(before, now)), now
            return (await ledger.counts()).states["succeeded"] == 2_010

        await until(all_done, within_s=90)
        assert 2 <= busy <= BUSY_MAX
    for each in (queue, ledger, outbox):
        await each.close()


async def test_connections_that_nothing_uses_are_closed_but_for_the_one_that_listens(
    base: Base,
) -> None:
    name = f"w{secrets.token_hex(4)}"
    engine = open_part(base.url(application_name=name, connections=5, idle_s=0.2), "database")
    bell = engine.listener("inbox")
    await bell.arm()
    sleeps = [engine.database.fetch("SELECT pg_sleep(0.3)", []) for _ in range(5)]
    asked = asyncio.gather(*sleeps)

    async def are(count: int) -> bool:
        return await base.connected(name) == count

    await until(lambda: are(5))
    await asked
    await until(lambda: are(1))
    queue = open_queue(base.url())
    await bell.arm()
    rung = asyncio.create_task(bell.wait(10_000))
    await queue.submit([NewJob(task="quick", payload=b"{}")])
    await asyncio.wait_for(rung, 5)
    await bell.close()
    await until(lambda: are(0))
    await queue.close()
    await engine.close()


async def test_one_connection_is_enough_where_the_url_says_so(base: Base) -> None:
    name = f"w{secrets.token_hex(4)}"
    url = base.url(application_name=name, connections=1)
    queue, outbox, other = open_queue(url), open_queue(url + "&box=outbox"), open_queue(url)
    waits = [asyncio.create_task(each.claim(9, wait_ms=5_000)) for each in (queue, outbox)]
    await other.submit([NewJob(task="quick", payload=b"{}", options=TOLD)] * 600)
    leases = await waits[0]
    assert len(leases) == 9
    assert await waits[1]
    assert await base.connected(name) == 1
    for each in (queue, outbox, other):
        await each.close()
    await until(lambda: _none(base, name))


async def _none(base: Base, name: str) -> bool:
    return await base.connected(name) == 0


async def test_an_error_of_the_database_does_not_show_the_row(base: Base) -> None:
    queue = open_queue(base.url())
    await queue.submit([NewJob(task="t", payload=b'"CANARY"')])
    await queue.close()
    database = Postgres(base.server, schema=base.name)
    with pytest.raises(ServerError, match="numbers_within_bounds") as refused:
        await database.script("UPDATE inbox_jobs SET attempt_count = -1")
    assert "CANARY" not in "".join(traceback.format_exception(refused.value))
    assert "CANARY" not in str(refused.value.reply)
    await database.close()


def test_event_loops_of_several_threads_join_and_leave_at_once() -> None:
    async def connect() -> Connection:
        raise NotImplementedError

    async def come_and_go(thread: int) -> None:
        pools = [shared_pool((thread, number), lambda: Pool(connect, 1)) for number in range(300)]
        for pool in pools:
            await release_pool(pool)

    every_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(asyncio.run, come_and_go(each)) for each in range(4)]:
                done.result()
    finally:
        sys.setswitchinterval(every_s)
