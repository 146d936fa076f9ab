"""Redis and PostgreSQL as child processes, for a machine that runs none.

async with embedded_redis(Path("data/redis")) as server:
    client = Redis(server.url)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from tenure.store.embedded.lifecycle import EmbeddedServer
from tenure.store.embedded.programs import locate_node
from tenure.store.embedded.servers import EmbeddedPostgres, EmbeddedRedis

__all__ = [
    "EmbeddedPostgres",
    "EmbeddedRedis",
    "embedded_postgres",
    "embedded_redis",
    "locate_node",
]

_Server = TypeVar("_Server", bound=EmbeddedServer)


def embedded_redis(
    data_dir: Path | None = None, *, appendfsync: str = "everysec", with_password: bool = False
) -> AbstractAsyncContextManager[EmbeddedRedis]:
    """A running Redis; without `data_dir` its data are removed with it."""
    return _running(EmbeddedRedis(data_dir, appendfsync=appendfsync, with_password=with_password))


def embedded_postgres(
    data_dir: Path | None = None,
) -> AbstractAsyncContextManager[EmbeddedPostgres]:
    """A running PostgreSQL; without `data_dir` its data are removed with it."""
    return _running(EmbeddedPostgres(data_dir))


@asynccontextmanager
async def _running(server: _Server) -> AsyncGenerator[_Server]:
    try:
        await asyncio.to_thread(server.start)
        yield server
    finally:
        await asyncio.to_thread(server.stop)
