"""One queue of its own for each test, and everything that opens on it."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from tenure.contracts.bullmq import Producer, open_events, open_producer
from tenure.contracts.bullmq.ledger import BullmqLedger
from tenure.contracts.bullmq.queue import BullmqQueue
from tenure.contracts.bullmq.records import QueueEvents
from tenure.core.registry import open_journal, open_ledger, open_queue
from tests.contract.adapters import Servers

_unique = itertools.count(1)


@dataclass
class Bench:
    """A queue, its parts, and a plain client that looks at what they leave."""

    server: str
    name: str
    raw: redis.Redis
    _closing: list[Callable[[], Awaitable[Any]]] = field(default_factory=list)

    def url(self, **options: Any) -> str:
        query = "".join(f"&{key}={value}" for key, value in options.items())
        return f"bullmq+{self.server}?queue={self.name}{query}"

    def key(self, name: str) -> str:
        return f"bull:{self.name}:{name}"

    def hash(self, job_id: str) -> dict[str, str]:
        found = self.raw.hgetall(self.key(job_id))
        return {name.decode(): value.decode() for name, value in found.items()}

    def ids(self, name: str) -> list[str]:
        kind = self.raw.type(self.key(name))
        read = self.raw.lrange if kind == b"list" else self.raw.zrange
        return [each.decode() for each in read(self.key(name), 0, -1)]

    def events(self) -> list[dict[str, str]]:
        entries = self.raw.xrange(self.key("events"))
        return [{a.decode(): b.decode() for a, b in fields.items()} for _, fields in entries]

    def queue(self, worker_id: str = "w", **options: Any) -> BullmqQueue:
        return self._opened(open_queue(self.url(**options), worker_id=worker_id))

    def producer(self, **options: Any) -> Producer:
        return self._opened(open_producer(self.url(), **options))

    def ledger(self) -> BullmqLedger:
        return self._opened(open_ledger(self.url()))

    def journal(self) -> Any:
        return self._opened(open_journal(self.url()))

    def followed(self) -> QueueEvents:
        return self._opened(open_events(self.url()))

    def _opened(self, it: Any) -> Any:
        self._closing.append(it.close)
        return it

    async def close(self) -> None:
        for close in self._closing:
            await close()
        self.raw.close()


@pytest.fixture
async def bench(servers: Servers) -> AsyncGenerator[Bench]:
    url = servers.redis()
    parts = urlsplit(url)
    client = redis.Redis(host=parts.hostname or "localhost", port=parts.port or 6379)
    bench = Bench(url, f"b{os.getpid()}-{next(_unique)}", client)
    yield bench
    await bench.close()
