"""Private servers for a machine that has none: children of this process, gone with it.

async with embedded_redis(Path("data/redis")) as server:
    client = Redis(server.url)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from tenure.store.embedded.programs import locate_node
from tenure.store.embedded.servers import EmbeddedPostgres, EmbeddedRedis

__all__ = [
    "EmbeddedPostgres",
    "EmbeddedRedis",
    "embedded_postgres",
    "embedded_redis",
    "locate_node",
]


@asynccontextmanager
async def embedded_redis(
    data_dir: Path | None = None, *, appendfsync: str = "everysec", with_password: bool = False
) -> AsyncGenerator[EmbeddedRedis]:
    """A running Redis; without `data_dir` its data go with it."""
    server = EmbeddedRedis(data_dir, appendfsync=appendfsync, with_password=with_password)
    try:
        await asyncio.to_thread(server.start)
        yield server
    finally:
        await asyncio.to_thread(server.stop)


@asynccontextmanager
async def embedded_postgres(data_dir: Path | None = None) -> AsyncGenerator[EmbeddedPostgres]:
    """A running PostgreSQL; without `data_dir` its data go with it."""
    server = EmbeddedPostgres(data_dir)
    try:
        await asyncio.to_thread(server.start)
        yield server
    finally:
        await asyncio.to_thread(server.stop)
