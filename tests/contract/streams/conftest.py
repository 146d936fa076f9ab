"""A real Redis per test process, and a namespace per test; redis-py looks from outside."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio

from tenure.contracts.streams.ledger import StreamsJournal, StreamsLedger
from tenure.contracts.streams.queue import StreamsQueue
from tenure.core.registry import open_journal, open_ledger, open_queue
from tenure.store.embedded import EmbeddedRedis


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """One private server for the tests of this process."""
    server = EmbeddedRedis()
    server.start()
    yield server
    server.stop()


class Bench:
    """One queue seen from all sides. `ns` stands before its keys."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self.server = server
        self.ns = f"t{secrets.token_hex(4)}:"
        self.outside = redis.asyncio.Redis.from_url(server.url, decode_responses=True)
        self._opened: list[StreamsQueue | StreamsLedger | StreamsJournal] = []

    def url(self, **options: object) -> str:
        extra = "".join(f"&{name}={value}" for name, value in options.items())
        return f"streams+{self.server.url}?namespace={self.ns}{extra}"

    def queue(self, worker_id: str = "w1", **options: object) -> StreamsQueue:
        return self._keep(open_queue(self.url(**options), worker_id=worker_id))

    def ledger(self, **options: object) -> StreamsLedger:
        return self._keep(open_ledger(self.url(**options)))

    def journal(self) -> StreamsJournal:
        return self._keep(open_journal(self.url()))

    def key(self, name: str) -> str:
        return self.ns + name

    async def job(self, job_id: str) -> dict[str, str]:
        return await self.outside.hgetall(self.key(f"job:{job_id}"))

    async def event_types(self, job_id: str) -> list[str]:
        entries = await self.outside.xrange(self.key(f"job:{job_id}:events"))
        return [fields["type"] for _, fields in entries]

    async def pending(self) -> int:
        return (await self.outside.xpending(self.key("jobs:stream"), "workers"))["pending"]

    async def close(self) -> None:
        for thing in self._opened:
            await thing.close()
        await self.outside.aclose()

    def _keep(self, thing):  # type: ignore[no-untyped-def]
        self._opened.append(thing)
        return thing


@pytest.fixture
async def bench(redis_server: EmbeddedRedis) -> AsyncIterator[Bench]:
    """A fresh queue on the shared server."""
    made = Bench(redis_server)
    yield made
    await made.close()
