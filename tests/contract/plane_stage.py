"""The `plane` contract for the conformance suite: a worker over real HTTP, a gateway in the test's
own loop, on SQLite and on PostgreSQL; through a proxy that can lose an answer."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

from tenure.core.registry import open_queue
from tenure.core.seam import Queue
from tenure.gateway.keys import MemoryKeyRing
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tests.contract.http_proxy import HttpProxy
from tests.contract.inbox_stage import migrated
from tests.contract.stages import Close, StoredStage, Words, query_of

WORDS = Words("QUEUED", "RUNNING", "SUCCEEDED", "DLQ", "DLQ")
# The suite asks for upkeep when it wants it, and counts what each round did.
QUIET: dict[str, object] = {"synchronous": "normal", "upkeep_ms": 0}
ONE_ORDER: Mapping[str, str] = {
    "priority": "a Redis stream has one order; what is urgent goes to a stream of its own"
}
_unique = itertools.count(1)


async def stage_of(
    plane_url: str, lease_ms: int, cannot: Mapping[str, str], stack: AsyncExitStack, streams: str
) -> StoredStage:
    """A gateway that serves a plane, and workers who speak to that."""
    settings = GatewaySettings(queues=(plane_url,), port=0, drain_ms=1_000)
    running = await stack.enter_async_context(serving(settings, ring=MemoryKeyRing()))

    async def lossy(worker_id: str) -> tuple[Queue, Callable[[], None], Close]:
        proxy = await HttpProxy(running.url).start()
        queue = open_queue(f"plane+{proxy.url}?streams={streams}", worker_id=worker_id)
        return queue, proxy.drop_reply, proxy.stop

    url = f"plane+{running.url}?streams={streams}"
    return StoredStage(url, lease_ms, cannot, WORDS, lossy, stack.aclose, plane_url)


class SqlitePlaneAdapter:
    """Every stage is a file of its own; the rows are the messages."""

    name = "plane"
    cannot: Mapping[str, str] = {}

    async def open(self, **options: int) -> StoredStage:
        stack = AsyncExitStack()
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tenure-plane-"))
        lease_ms = options.setdefault("lease_ms", 500)
        query = query_of({**options, **QUIET, "streams": "jobs"})
        url = f"plane+sqlite:///{folder}/plane.db?{query}"
        return await stage_of(url, lease_ms, self.cannot, stack, "jobs")


class PostgresPlaneAdapter:
    """Every stage is a stream of its own in one schema of a private server."""

    name = "plane_postgres"
    cannot: Mapping[str, str] = {}
    _migrated: set[tuple[str, str]] = set()  # noqa: RUF012

    def __init__(self, server_url: Callable[[], str]) -> None:
        self._server_url = server_url

    async def open(self, **options: int) -> StoredStage:
        # Two adapters in one schema would meet each other's jobs and keys.
        server, schema = self._server_url(), f"{self.name}_{os.getpid()}"
        if (server, schema) not in self._migrated:
            await migrated(server, schema)
            self._migrated.add((server, schema))
        lease_ms = options.setdefault("lease_ms", 700)
        stream = f"stage-{next(_unique)}"
        own = {**QUIET, "schema": schema, "streams": stream, **self._transport()}
        url = f"plane+{server}{'&' if '?' in server else '?'}{query_of({**options, **own})}"
        return await stage_of(url, lease_ms, self.cannot, AsyncExitStack(), stream)

    def _transport(self) -> dict[str, object]:
        """The rows are the messages."""
        return {}


class PostgresRedisPlaneAdapter(PostgresPlaneAdapter):
    """The same, and a Redis whose streams carry the messages."""

    name = "plane_postgres_redis"
    cannot = ONE_ORDER

    def __init__(self, server_url: Callable[[], str], redis_url: Callable[[], str]) -> None:
        super().__init__(server_url)
        self._redis_url = redis_url

    def _transport(self) -> dict[str, object]:
        return {"redis": self._redis_url(), "namespace": f"suite-pg-{os.getpid()}:"}


class RedisPlaneAdapter:
    """A file of its own for the truth, and a Redis whose streams carry the messages."""

    name = "plane_redis"
    cannot = ONE_ORDER

    def __init__(self, server_url: Callable[[], str]) -> None:
        self._server_url = server_url

    async def open(self, **options: int) -> StoredStage:
        stack = AsyncExitStack()
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tenure-plane-"))
        lease_ms = options.setdefault("lease_ms", 500)
        namespace = f"suite-{os.getpid()}-{next(_unique)}:"
        own = {**QUIET, "streams": "jobs", "redis": self._server_url(), "namespace": namespace}
        url = f"plane+sqlite:///{folder}/plane.db?{query_of({**options, **own})}"
        return await stage_of(url, lease_ms, self.cannot, stack, "jobs")
