"""Servers that answer and execute nothing: the client leaves them, and works again later."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from tenure.core.errors import ReplyLost, StoreUnreachable
from tenure.store.redis import Redis
from tests.ports import free_port
from tests.redis_topologies import Server
from tests.waiting import until

KEYS = 2_000
VALUE = b"x" * 5_000  # it answers every two megabytes


@pytest.fixture
def slow_loader(tmp_path: Path) -> Generator[Server]:
    """It takes two seconds to load its data, and answers meanwhile."""
    slow = ("key-load-delay 1000", "rdbcompression no", 'save ""')
    server = Server(tmp_path, free_port(), *slow)
    yield server
    server.end()


async def answer(client: Redis) -> object:
    """What a GET brings; the error if it was not executed."""
    try:
        return await client.call("GET", "k1")
    except (StoreUnreachable, ReplyLost) as error:
        return error


async def test_a_server_that_loads_its_data_is_left_and_tried_again(slow_loader: Server) -> None:
    slow_loader.admin.mset({f"k{n}": VALUE for n in range(KEYS)})
    slow_loader.admin.save()
    client = Redis(f"redis://127.0.0.1:{slow_loader.port}/0")
    assert await answer(client) == VALUE
    slow_loader.kill()
    slow_loader.start(wait=False)

    async def is_loading() -> bool:
        found = await answer(client)
        return isinstance(found, StoreUnreachable) and str(found.reply).startswith("LOADING")

    async def is_ready() -> bool:
        return await answer(client) == VALUE

    await until(is_loading)
    await until(is_ready)
    await client.close()


async def test_a_replica_that_lost_its_primary_is_left_and_tried_again(tmp_path: Path) -> None:
    server = Server(tmp_path, free_port(), "replica-serve-stale-data no", 'save ""')
    client = Redis(f"redis://127.0.0.1:{server.port}/0")
    try:
        await client.call("SET", "k1", 1)
        server.admin.replicaof("127.0.0.1", 1)
        with pytest.raises(StoreUnreachable, match="lost its primary") as caught:
            await client.call("GET", "k1")
        assert str(caught.value.reply).startswith("MASTERDOWN")
        server.admin.replicaof("NO", "ONE")

        async def is_ready() -> bool:
            return await answer(client) == b"1"

        await until(is_ready)
    finally:
        await client.close()
        server.end()
