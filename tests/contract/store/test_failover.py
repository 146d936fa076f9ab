"""A planned failover: the primary becomes a replica under running workers and a gateway.

One address stands before both servers, as a name in DNS or a load balancer would: connections that
are open stay with the old primary, and only a new one finds the new primary.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from tenure.core.errors import StoreUnreachable
from tenure.core.job import NewJob
from tenure.core.registry import open_queue
from tenure.gateway.keys import MemoryKeyRing
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tenure.store.embedded import EmbeddedRedis
from tenure.store.redis import Redis
from tenure.worker import Job, Settings, Worker, task
from tests.chaos.proxy import LossyProxy
from tests.contract.gateway.web import Web

JOBS = 20
DEADLINE_S = 20.0


class Pair:
    """Two servers behind one address."""

    def __init__(self, first: EmbeddedRedis, second: EmbeddedRedis, door: LossyProxy) -> None:
        self.primary, self.replica = first, second
        self.door = door

    async def fail_over(self, *, open_door: bool = True) -> None:
        """The replica takes over; the old primary follows it, and keeps its connections."""
        await follow(self.replica, None)
        await follow(self.primary, self.replica)
        self.primary, self.replica = self.replica, self.primary
        if open_door:
            self.door.lead_to(self.primary.url)


async def follow(server: EmbeddedRedis, primary: EmbeddedRedis | None) -> None:
    client = Redis(server.url)
    if primary is None:
        await client.call("REPLICAOF", "NO", "ONE")
    else:
        leader = Redis(primary.url)
        await leader.call("CONFIG", "SET", "repl-diskless-sync-delay", 0)  # 5 s by default
        await leader.close()
        await client.call("REPLICAOF", "127.0.0.1", urlsplit(primary.url).port or 0)

        async def in_step() -> bool:
            return b"master_link_status:up" in await client.call("INFO", "replication")

        await until(in_step)
    await client.close()


async def until(holds: Callable[[], Awaitable[Any]]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not await holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.02)  # the servers have no event to wait for


@pytest.fixture
async def pair() -> AsyncGenerator[Pair]:
    servers = [EmbeddedRedis(appendfsync="no") for _ in range(2)]
    for server in servers:
        await asyncio.to_thread(server.start)
    await follow(servers[1], servers[0])
    async with LossyProxy(servers[0].url) as door:
        yield Pair(*servers, door)
    for server in servers:
        await asyncio.to_thread(server.stop)


@asynccontextmanager
async def working(url: str, done: set[str]) -> AsyncGenerator[Worker]:
    @task("work")
    async def work(job: Job) -> None:
        done.add(job.id)

    settings = Settings(concurrency=5, backoff_ms_max=200)
    worker = Worker([work], queues=[url], settings=settings)
    served = asyncio.ensure_future(worker.serve())
    yield worker
    assert not served.done(), "the worker went on"
    worker.stop()
    assert await served == 0


async def submit(url: str, first: int) -> set[str]:
    """Jobs that are stored in any case: their ids make it harmless to send them again."""
    queue = open_queue(url)
    jobs = [NewJob(task="work", payload=b"{}", job_id=f"j{first + n}") for n in range(JOBS)]

    async def stored() -> bool:
        try:
            answers = await queue.submit(jobs)
        except StoreUnreachable:
            return False
        return all(answer.accepted for answer in answers)

    await until(stored)
    await queue.close()
    return {job.job_id for job in jobs}


@pytest.mark.parametrize("contract", ["streams", "bullmq", "omniq"])
async def test_workers_go_on_with_the_new_primary_after_a_failover(
    pair: Pair, contract: str
) -> None:
    done: set[str] = set()
    query = "lease_ms=5000" if contract == "streams" else "queue=failover"
    url = f"{contract}+{pair.door.url}?{query}"

    async def all_done() -> bool:
        return ids <= done

    async with working(url, done):
        ids = await submit(url, 0)
        await until(all_done)
        await pair.fail_over()
        ids |= await submit(url, JOBS)
        await until(all_done)


async def test_a_gateway_is_not_ready_while_its_store_takes_no_writes(pair: Pair) -> None:
    url = f"streams+{pair.door.url}"
    settings = GatewaySettings(queues=(url,), port=0, drain_ms=500, heartbeat_ms=200)
    async with serving(settings, ring=MemoryKeyRing()) as running:
        web = Web(running.url)

        async def status() -> int:
            return (await web.send("GET", "/readyz")).status

        async def is_ready() -> bool:
            return await status() == 200

        async def is_not_ready() -> bool:
            return await status() == 503

        assert await is_ready()
        await pair.fail_over(open_door=False)
        await until(is_not_ready)
        told = await web.send("GET", "/readyz?verbose")
        assert b"READONLY" in told.body, told.body
        pair.door.lead_to(pair.primary.url)
        await until(is_ready)


async def test_a_client_leaves_a_server_that_became_a_replica(pair: Pair) -> None:
    client = Redis(pair.door.url)
    await client.call("SET", "k", "1")
    blocked = asyncio.ensure_future(client.block("BLPOP", "nothing", 10, wait_ms=10_000))
    await until_blocked(pair.primary)
    await pair.fail_over()
    with pytest.raises(StoreUnreachable):
        await blocked
    with pytest.raises(StoreUnreachable, match="read-only replica"):
        await client.call("SET", "k", "2")
    await client.call("SET", "k", "3")
    assert await client.call("GET", "k") == b"3"
    await client.close()


async def until_blocked(server: EmbeddedRedis) -> None:
    admin = Redis(server.url)

    async def blocked() -> bool:
        return b"blocked_clients:1" in await admin.call("INFO", "clients")

    await until(blocked)
    await admin.close()


async def test_a_server_that_stays_a_replica_is_dialled_with_growing_pauses(pair: Pair) -> None:
    client = Redis(pair.door.url)
    await client.call("PING")
    await pair.fail_over(open_door=False)
    before = pair.door.accepted
    until_s = time.monotonic() + 1.5
    while time.monotonic() < until_s:
        with pytest.raises(StoreUnreachable):
            await client.call("SET", "k", "2")
    assert 2 <= pair.door.accepted - before <= 9
    await client.close()
