"""A private Redis for the peers that share one with us, and a plain client that looks at it."""

from __future__ import annotations

from collections.abc import Generator
from urllib.parse import urlsplit

import pytest
import redis

from tenure.store.embedded import EmbeddedRedis


@pytest.fixture(scope="session")
def server() -> Generator[str]:
    server = EmbeddedRedis(appendfsync="no")
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def port(server: str) -> int:
    port = urlsplit(server).port
    assert port
    return port


@pytest.fixture(scope="session")
def raw(port: int) -> Generator[redis.Redis]:
    client = redis.Redis(port=port)
    yield client
    client.close()
