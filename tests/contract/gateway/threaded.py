"""A gateway in a thread of its own, for clients that ask synchronously."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from tenure.gateway.server import run_loop, serving
from tenure.gateway.settings import GatewaySettings


@contextmanager
def served_in_a_thread(settings: GatewaySettings, **more: Any) -> Generator[str]:
    """Serve, as `serving` takes it, until the block ends; its URL."""
    url: Future[str] = Future()
    stop = asyncio.Event()
    loop: asyncio.AbstractEventLoop

    async def main() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        async with serving(settings, **more) as running:
            url.set_result(running.url)
            await stop.wait()

    thread = threading.Thread(target=run_loop, args=(main(),))
    thread.start()
    try:
        yield url.result(20)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
    assert not thread.is_alive()
