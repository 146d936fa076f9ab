"""The gateway of the contract tests, and foreign programs that follow its jobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract.gateway.conftest import redis_server, site
from tests.interop.npm import installed

__all__ = ["redis_server", "site"]

HERE = Path(__file__).parent


class Follower:
    """A running program that prints what it sees."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        assert process.stdout is not None
        self._out = process.stdout

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        """Everything it prints until it ends by itself."""
        async for line in self._out:
            yield json.loads(line)

    async def until(self, kind: str) -> list[dict[str, Any]]:
        """What it prints up to the first line of a kind."""
        seen = []
        async with asyncio.timeout(20):
            async for line in self.lines():
                seen.append(line)
                if line["type"] == kind:
                    return seen
        raise AssertionError(f"it ended without {kind!r}: {seen}")


Start = Callable[..., Awaitable[Follower]]


@pytest.fixture
async def node_follower() -> AsyncGenerator[Start]:
    """Starts npm's EventSource on a URL."""
    node = await asyncio.to_thread(installed, HERE)
    started: list[asyncio.subprocess.Process] = []

    async def start(url: str, *more: str) -> Follower:
        process = await asyncio.create_subprocess_exec(
            str(node), str(HERE / "follow.mjs"), url, *more, stdout=asyncio.subprocess.PIPE
        )
        started.append(process)
        return Follower(process)

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.wait()
