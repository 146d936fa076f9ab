"""A gateway on a real Redis, in the test's own event loop, and workers that play their part."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tenure.contracts.streams.ledger import StreamsLedger
from tenure.contracts.streams.queue import StreamsQueue
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome
from tenure.core.registry import open_ledger, open_queue
from tenure.gateway.server import RunningGateway, serving
from tenure.gateway.settings import GatewaySettings
from tenure.store.embedded import EmbeddedRedis
from tenure.store.redis import Redis
from tests.contract.gateway.web import Web


@pytest.fixture(scope="session")
def redis_server() -> Generator[EmbeddedRedis]:
    """One private server for the tests of this process; each test has its own namespace."""
    server = EmbeddedRedis(appendfsync="no")
    server.start()
    yield server
    server.stop()


class Site:
    """One queue with gateways before it and a worker behind it."""

    def __init__(self, redis_url: str, stack: AsyncExitStack) -> None:
        self.redis_url = redis_url
        self.ns = f"t{secrets.token_hex(4)}:"
        self._stack = stack
        self._closing: list[Callable[[], Awaitable[None]]] = []
        self.redis = self._kept(Redis(redis_url))
        self.worker: StreamsQueue = self._kept(open_queue(self.url(), worker_id="w1"))
        self.ledger: StreamsLedger = self._kept(open_ledger(self.url()))

    def url(self, **options: object) -> str:
        extra = "".join(f"&{name}={value}" for name, value in options.items())
        return f"streams+{self.redis_url}?namespace={self.ns}{extra}"

    async def gateway(self, **settings: Any) -> RunningGateway:
        """A gateway that serves until the test is over."""
        settings.setdefault("queues", (self.url(),))
        settings.setdefault("port", 0)
        return await self._stack.enter_async_context(serving(GatewaySettings(**settings)))

    async def web(self, **settings: Any) -> Web:
        """A client of a new gateway."""
        return Web((await self.gateway(**settings)).url)

    async def claim(self) -> Lease:
        leases = await self.worker.claim(1, wait_ms=5_000)
        assert leases, "there was nothing to claim"
        return leases[0]

    async def tell(self, lease: Lease, step: str, data: bytes = b"{}") -> None:
        assert await self.worker.report([Report(lease=lease, step=step, data=data)]) == [None]

    async def finish(self, lease: Lease, result: bytes = b'{"ok":true}') -> None:
        await self.worker.settle([Outcome(lease, "complete", result)])

    async def close(self) -> None:
        for close in self._closing:
            await close()

    def _kept(self, thing: Any) -> Any:
        self._closing.append(thing.close)
        return thing


@pytest.fixture
async def site(redis_server: EmbeddedRedis) -> AsyncGenerator[Site]:
    async with AsyncExitStack() as stack:
        made = Site(redis_server.url, stack)
        stack.push_async_callback(made.close)
        yield made


@pytest.fixture
async def web(site: Site) -> Web:
    """A client of a gateway with default settings."""
    return await site.web()
