"""One queue of its own for each test, and everything that opens on it."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import redis

from tenure.contracts.omniq import Client, OmniqLedger, OmniqQueue, Reserved
from tenure.contracts.omniq.calls import SCRIPTS
from tenure.core.journal import JournalEvent
from tenure.core.registry import open_journal, open_ledger, open_queue
from tests.chaos.proxy import LossyProxy
from tests.contract.adapters import Servers
from tests.contract.omniq.tables import untrue
from tests.contract.stages import load_scripts, runs_a_script

_unique = itertools.count(1)


@dataclass
class Bench:
    """A queue, its parts, and a plain client that looks at what they leave."""

    server: str
    name: str
    raw: redis.Redis
    client: Client
    _closing: list[Callable[[], Awaitable[Any]]] = field(default_factory=list)

    def url(self, **options: Any) -> str:
        query = "".join(f"&{key}={value}" for key, value in options.items())
        return f"omniq+{self.server}?queue={self.name}{query}"

    def key(self, name: str) -> str:
        return f"{{{self.name}}}:{name}"

    def hash(self, job_id: str) -> dict[str, str]:
        found = self.raw.hgetall(self.key(f"job:{job_id}"))
        return {name.decode(): value.decode() for name, value in found.items()}

    def ids(self, name: str) -> list[str]:
        kind = self.raw.type(self.key(name))
        read = self.raw.lrange if kind == b"list" else self.raw.zrange
        return [each.decode() for each in read(self.key(name), 0, -1)]

    def all_keys(self) -> set[str]:
        return {key.decode() for key in self.raw.scan_iter(self.key("*"), count=1000)}

    def another(self) -> Client:
        """A client of its own, as another process would have it."""
        client = Client(self.server)
        self._closing.append(client.close)
        return client

    def queue(self, worker_id: str = "w", **options: Any) -> OmniqQueue:
        return self._opened(open_queue(self.url(**options), worker_id=worker_id))

    async def lossy_queue(self, **options: Any) -> tuple[OmniqQueue, Callable[[], None]]:
        """A queue, and a function that makes it lose the answer to its next script."""
        await load_scripts(self.server, SCRIPTS)
        proxy = await LossyProxy(self.server).start()
        url = self.url(**options).replace(self.server, proxy.url)
        queue = self._opened(open_queue(url, worker_id="lossy"))
        await queue.upkeep()
        self._closing.append(proxy.stop)
        return queue, partial(proxy.drop_reply, when=runs_a_script)

    async def lossy_client(self) -> tuple[Client, Callable[[], None]]:
        """A client, and a function that makes it lose the answer to its next script."""
        await load_scripts(self.server, SCRIPTS)
        proxy = await LossyProxy(self.server).start()
        client = Client(proxy.url)
        await client.is_paused(self.name)
        self._closing += [client.close, proxy.stop]
        return client, partial(proxy.drop_reply, when=runs_a_script)

    async def run_all(self, count: int) -> list[str]:
        """Reserve and complete so many jobs, one after the other."""
        done = []
        for _ in range(count):
            job = await self.reserve()
            await self.client.ack_success(self.name, job.job_id, job.lease_token)
            done.append(job.job_id)
        return done

    def ledger(self) -> OmniqLedger:
        return self._opened(open_ledger(self.url()))

    async def history(self) -> list[JournalEvent]:
        journal = self._opened(open_journal(self.url()))
        events: list[JournalEvent] = []
        while more := await journal.read(after=events[-1].seq if events else ""):
            events += more
        return events

    async def publish(self, *payloads: Any, **options: Any) -> list[str]:
        return [await self.client.publish(self.name, each, **options) for each in payloads]

    async def reserve(self, now_ms: int = 0) -> Reserved:
        job = await self.client.reserve(self.name, now_ms)
        assert isinstance(job, Reserved), f"no job to reserve but {job}"
        return job

    async def reserved_ids(self, most: int) -> list[str]:
        return [job.job_id for job in await self.client.reserve_many(self.name, most)]

    def _opened(self, it: Any) -> Any:
        self._closing.append(it.close)
        return it

    async def close(self) -> None:
        for close in self._closing:
            await close()
        await self.client.close()
        self.raw.close()


@pytest.fixture
async def bench(servers: Servers) -> AsyncGenerator[Bench]:
    """After every test the counters and mirror tables must say what stands in the lanes."""
    url = servers.redis()
    name = f"o{os.getpid()}-{next(_unique)}"
    bench = Bench(url, name, redis.Redis.from_url(url), Client(url))
    yield bench
    found = untrue(bench.raw, name)
    await bench.close()
    assert not found, "\n".join(found)
