"""A plane on a database of its own, served over HTTP in the test's own event loop."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tenure.contracts.plane.ledger import PlaneLedger
from tenure.contracts.plane.queue import PlaneQueue
from tenure.core.registry import open_journal, open_ledger, open_queue
from tenure.gateway.keys import KeyRing, MemoryKeyRing
from tenure.gateway.server import RunningGateway, serving
from tenure.gateway.settings import GatewaySettings
from tests.contract.adapters import Servers
from tests.contract.gateway.web import Web


class Site:
    """One database with planes before it."""

    def __init__(self, store: str, stack: AsyncExitStack) -> None:
        self.store = store
        self.stack = stack
        self.ring: KeyRing = MemoryKeyRing()

    def url(self, **options: object) -> str:
        options.setdefault("synchronous", "normal")
        options.setdefault("upkeep_ms", 0)
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"plane+{self.store}?{query}"

    async def gateway(self, url: str = "", **settings: Any) -> RunningGateway:
        """A gateway that serves a plane until the test is over."""
        settings = {"port": 0, "drain_ms": 1_000, **settings}
        made = GatewaySettings(queues=(url or self.url(),), **settings)
        return await self.stack.enter_async_context(serving(made, ring=self.ring))

    async def web(self, **options: object) -> Web:
        """A client of a new plane with these options."""
        return Web((await self.gateway(self.url(**options))).url)

    def ledger(self, **options: object) -> PlaneLedger:
        return self.kept(open_ledger(self.url(**options)))

    def journal(self, **options: object) -> Any:
        return self.kept(open_journal(self.url(**options)))

    def local(self, **options: object) -> PlaneQueue:
        return self.kept(open_queue(self.url(**options), worker_id="here"))

    def worker(self, address: str, worker_id: str = "w1", query: str = "") -> PlaneQueue:
        return self.kept(open_queue(f"plane+{address}{query}", worker_id=worker_id))

    def kept(self, thing: Any) -> Any:
        self.stack.push_async_callback(thing.close)
        return thing


@pytest.fixture
async def site(tmp_path: Path) -> AsyncGenerator[Site]:
    async with AsyncExitStack() as stack:
        yield Site(f"sqlite:///{tmp_path}/plane.db", stack)


@pytest.fixture
async def redis_options(servers: Servers) -> dict[str, object]:
    """Options of a plane whose messages travel through Redis."""
    return {"redis": servers.redis(), "namespace": f"t{secrets.token_hex(4)}:"}


async def enqueue(web: Web, **fields: Any) -> str:
    """A job, of which only the id matters."""
    reply = await web.post("/v1/plane/jobs", {"payload": {"n": 1}} | fields)
    assert reply.status == 202, reply
    return str(reply.json["job_id"])


async def verb(web: Web, name: str, **fields: Any) -> Any:
    """The answer of one of the workers' verbs."""
    reply = await web.post(f"/internal/worker/{name}", {"worker_id": "w1"} | fields)
    assert reply.status == 200, reply
    return reply.json


async def claim(web: Web, **fields: Any) -> Any:
    """One lease, by the contract's own call."""
    answer = await verb(web, "claim", **({"streams": [], "max_wait_ms": 5_000} | fields))
    assert answer["claimed"], answer
    return answer


def proof(lease: Any) -> dict[str, Any]:
    """What a worker sends to end the attempt it holds."""
    return {name: lease[name] for name in ("job_id", "attempt_id", "lease_token", "stream")}
