"""A private Redis for the tests of the client, and a proxy before it."""

from collections.abc import AsyncGenerator, Generator

import pytest

from tenure.store.embedded import EmbeddedRedis
from tenure.store.redis import Redis
from tests.chaos.proxy import LossyProxy


@pytest.fixture(scope="module")
def server() -> Generator[EmbeddedRedis]:
    """One server a module; tests use keys of their own."""
    server = EmbeddedRedis(appendfsync="no")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def redis(server: EmbeddedRedis) -> AsyncGenerator[Redis]:
    client = Redis(server.url)
    yield client
    await client.close()


@pytest.fixture
async def proxy(server: EmbeddedRedis) -> AsyncGenerator[LossyProxy]:
    async with LossyProxy(server.url) as proxy:
        yield proxy
