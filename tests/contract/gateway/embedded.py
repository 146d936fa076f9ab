"""Any ASGI application behind plain uvicorn, in the loop of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn


@asynccontextmanager
async def served(app: Any, **options: Any) -> AsyncGenerator[str]:
    """The URL of a server that serves the application until the block ends."""
    config = uvicorn.Config(
        app, port=0, log_config=None, ws="none", timeout_graceful_shutdown=2, **options
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    try:
        while not server.started:
            assert not running.done(), "the server did not start"
            await asyncio.sleep(0.01)  # a poll: uvicorn announces its start to nobody
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await running
