"""Programs of another make on the streams contract, in an environment of their own.

They know the contract's exact key names only, so every test has a Redis of its own.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import redis.asyncio

from benchmarks.harness.environments import made_from
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tenure.store.embedded import EmbeddedRedis
from tests.contract.gateway.web import Web
from tests.waiting import until

HERE = Path(__file__).parent
Process = asyncio.subprocess.Process


class Stage:
    """A Redis, our gateway before it, and the foreign programs beside it."""

    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self.redis_url = url
        self.redis = redis.asyncio.Redis.from_url(url, decode_responses=True)
        self._stack = stack

    def url(self, **options: object) -> str:
        words = "&".join(f"{name}={value}" for name, value in options.items())
        return f"streams+{self.redis_url}" + (f"?{words}" if words else "")

    async def our_gateway(self) -> Web:
        settings = GatewaySettings(queues=(self.url(),), port=0)
        return Web((await self._stack.enter_async_context(serving(settings))).url)

    async def foreign_gateway(self) -> Web:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        await self._start("gateway.py", str(port))
        web = Web(f"http://127.0.0.1:{port}")

        async def answers() -> bool:
            try:
                return (await web.get("/v1/jobs/none")).status == 404
            except OSError:
                return False

        await until(answers, "the foreign gateway answers")
        return web

    async def foreign_worker(self, name: str = "foreign") -> Process:
        process = await self._start("worker.py", name)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        return process

    async def runs(self, job_id: str) -> int:
        """How often a job was started, whoever did."""
        entries = await self.redis.xrange(f"job:{job_id}:events")
        return sum(fields["type"] == "running" for _, fields in entries)

    async def status(self, job_id: str) -> str:
        return str(await self.redis.hget(f"job:{job_id}", "status"))

    async def _start(self, program: str, *words: str) -> Process:
        python = await asyncio.to_thread(made_from, HERE / "requirements.txt", "streams-foreign")
        # Without PYTHONPATH: nothing of ours is within their reach.
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = await asyncio.create_subprocess_exec(
            str(python / "python"), str(HERE / program), self.redis_url, *words,
            stdout=asyncio.subprocess.PIPE, env=clean,
        )  # fmt: skip

        async def end() -> None:
            if process.returncode is None:
                process.kill()
            await process.communicate()

        self._stack.push_async_callback(end)
        return process


@pytest.fixture
async def stage() -> AsyncGenerator[Stage]:
    server = EmbeddedRedis(appendfsync="no")
    await asyncio.to_thread(server.start)
    try:
        async with AsyncExitStack() as stack:
            made = Stage(server.url, stack)
            stack.push_async_callback(made.redis.aclose)
            yield made
    finally:
        await asyncio.to_thread(server.stop)
