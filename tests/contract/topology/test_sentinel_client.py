"""The Redis client with Sentinels: it finds the primary, and leaves one that is being replaced."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncGenerator

import pytest

from tenure.core.errors import ReplyLost, StoreUnreachable
from tenure.store.redis import BulkRedis, Redis
from tests.redis_topologies import SERVICE, SentinelSet
from tests.waiting import until

pytestmark = pytest.mark.few

RECOVERED_WITHIN_S = 15.0


@pytest.fixture
async def client(watched: SentinelSet) -> AsyncGenerator[Redis]:
    client = Redis(watched.url)
    await client.call("PING")
    yield client
    await client.close()


async def port_of(client: Redis) -> int | None:
    """The port of the server that takes the client's writes; None while none does."""
    try:
        await client.call("SET", "k", 1)
        info = await client.call("INFO", "server")
    except (StoreUnreachable, ReplyLost):
        return None
    return int(info.partition(b"tcp_port:")[2].split(b"\r\n")[0])


async def test_the_primary_is_the_one_that_redis_py_finds(
    watched: SentinelSet, client: Redis
) -> None:
    assert await port_of(client) == watched.primary().port


async def test_a_planned_failover_is_followed_without_an_error_from_the_old_primary(
    watched: SentinelSet, client: Redis
) -> None:
    """The Sentinels say so before the old primary knows that it is a replica."""
    blocked = asyncio.create_task(client.block("BLPOP", "nothing", 30, wait_ms=30_000))
    await until(lambda: watched.primary().admin.info("clients")["blocked_clients"] > 0)
    new = await asyncio.to_thread(watched.fail_over)
    with pytest.raises((StoreUnreachable, ReplyLost)):
        await asyncio.wait_for(blocked, RECOVERED_WITHIN_S)

    async def is_new() -> bool:
        return await port_of(client) == new.port

    await until(is_new, within_s=RECOVERED_WITHIN_S)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
async def test_a_primary_that_is_gone_is_replaced_in_time(
    watched: SentinelSet, client: Redis, how: signal.Signals
) -> None:
    before = watched.primary()
    hung = asyncio.create_task(client.block("BLPOP", "nothing", 60, wait_ms=60_000))
    await until(lambda: before.admin.info("clients")["blocked_clients"] > 0)
    if how == signal.SIGSTOP:
        before.signal(signal.SIGSTOP)
    else:
        before.kill()
    began = time.monotonic()
    call = asyncio.create_task(client.call("PING"))
    with pytest.raises((StoreUnreachable, ReplyLost)):
        await asyncio.wait_for(hung, RECOVERED_WITHIN_S)
    await asyncio.gather(call, return_exceptions=True)

    async def is_another() -> bool:
        return await port_of(client) not in (None, before.port)

    await until(is_another, within_s=RECOVERED_WITHIN_S - (time.monotonic() - began))
    if how == signal.SIGSTOP:
        before.signal(signal.SIGCONT)
    else:
        await asyncio.to_thread(before.start)


async def test_a_sentinel_that_is_down_is_passed_over(watched: SentinelSet) -> None:
    ports = ",".join(f"127.0.0.1:{port}" for port in (1, watched.sentinels[0].port))
    client = Redis(f"redis+sentinel://{ports}/{SERVICE}")
    assert await port_of(client) == watched.primary().port
    await client.close()


async def test_an_unknown_service_is_told(watched: SentinelSet) -> None:
    client = Redis(f"redis+sentinel://127.0.0.1:{watched.sentinels[0].port}/nothing")
    with pytest.raises(StoreUnreachable, match=r"no Sentinel answers.*does not know the service"):
        await client.call("PING")
    await client.close()


async def test_a_replica_that_a_sentinel_names_is_not_used(watched: SentinelSet) -> None:
    """A Sentinel may lag behind: the server itself says what it is before it is used."""
    replica = next(each for each in watched.servers if each is not watched.primary())
    answer = b"*2\r\n$9\r\n127.0.0.1\r\n$5\r\n%d\r\n" % replica.port

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(b"+OK\r\n" if b"SETNAME" in data else b"")
            writer.write(answer if b"SENTINEL" in data else b"")
        writer.close()

    listener = await asyncio.start_server(lie, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    client = Redis(f"redis+sentinel://127.0.0.1:{port}/{SERVICE}")
    with pytest.raises(StoreUnreachable, match="it is a slave, not the primary"):
        await client.call("GET", "k")
    await client.close()
    listener.close()


def test_a_bulk_reader_finds_the_primary(watched: SentinelSet) -> None:
    with BulkRedis(watched.url) as bulk:
        assert bulk.call("ROLE")[0] == b"master"
