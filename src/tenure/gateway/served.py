"""A queue as the gateway holds it open: queue, ledger, journal and the feed over them."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from tenure.client.feed import follow_ledger
from tenure.core.endpoint import Endpoint, Submits
from tenure.core.errors import StoreError, UsageError
from tenure.core.job import NewJob, Submitted
from tenure.core.redaction import Redaction
from tenure.core.registry import open_journal, open_ledger, open_part, open_queue, parse_url
from tenure.core.seam import Ledger
from tenure.core.state import MACHINES
from tenure.dashboard.queues import OpenQueue
from tenure.dashboard.views import Warn
from tenure.gateway.feed import Feed
from tenure.gateway.metrics import Metrics
from tenure.gateway.settings import GatewaySettings
from tenure.store.batcher import Batcher
from tenure.store.redis import Redis

_BATCH_JOBS_MAX = 100
_BATCH_BYTES_MAX = 1 << 20
_WARNINGS_CACHE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedQueue(OpenQueue):
    """One queue of one contract. `name` is what /api/queues calls it."""

    feed: Feed

    def endpoints(self, settings: GatewaySettings, submits: Submits) -> list[Endpoint]:
        """The HTTP side of the contract; [] for a contract that has none."""
        module = f"tenure.contracts.{self.contract}.routes"
        if importlib.util.find_spec(module) is None:
            return []
        found = importlib.import_module(module)
        routes = found.open_routes(
            submits,
            self.ledger,
            ttl_s=settings.ttl_s,
            redaction=Redaction(settings.redact),
            **settings.route_options,
        )
        if hasattr(found, "open_worker_routes"):
            routes += found.open_worker_routes(self.queue)
        return cast("list[Endpoint]", routes)

    def start(self) -> None:
        """Start the feed, and the queue's own tasks if it has any."""
        self.feed.start()
        if hasattr(self.queue, "start"):
            self.queue.start()

    def drain(self) -> None:
        """Answer long polls that wait for a job."""
        if hasattr(self.queue, "drain"):
            self.queue.drain()

    async def close(self) -> None:
        """Stop the feed and close all connections."""
        await self.feed.close()
        await OpenQueue.close(self)  # super() does not work in a dataclass with slots


def open_served(
    urls: Sequence[str], settings: GatewaySettings, metrics: Metrics
) -> list[ServedQueue]:
    """Open the queues behind these URLs; they connect on first use."""
    served = [_open(url, settings, metrics) for url in urls]
    names = [each.name for each in served]
    for name in names:
        if names.count(name) > 1:  # pages and /api could not tell them apart
            raise UsageError(
                f"two queues are called {name!r}; a gateway serves one of them, or queues whose "
                "URLs differ in `queue`"
            )
    return served


def _open(url: str, settings: GatewaySettings, metrics: Metrics) -> ServedQueue:
    parsed = parse_url(url)
    ledger, journal = open_ledger(url), open_journal(url)
    machine = MACHINES.get(parsed.contract)
    feed = Feed(
        follow_ledger(ledger),
        journal,
        final=machine.final if machine else (),
        sweep_ms=settings.sweep_ms,
        heartbeat_ms=settings.heartbeat_ms,
        client_bytes_max=settings.client_bytes_max,
        on_events=metrics.sse_events.inc,
        redaction=Redaction(settings.redact),
    )
    return ServedQueue(
        name=parsed.name,
        contract=parsed.contract,
        queue=open_queue(url),
        ledger=ledger,
        journal=journal,
        address=parsed.safe,
        outbox=_outbox(url),
        feed=feed,
    )


def _outbox(url: str) -> Ledger | None:
    """The ledger of the events to be delivered, where the contract has them."""
    try:
        return cast("Ledger | None", open_part(url, "outbox"))
    except UsageError:
        return None


class SubmitBatcher:
    """Joins the submits of many clients into one call of the queue at a time.

    A job whose client disconnected before it was sent is not stored.
    """

    def __init__(self, queue: Submits) -> None:
        self._submits: Batcher[NewJob, Submitted] = Batcher(
            queue.submit,
            items_max=_BATCH_JOBS_MAX,
            size_max=_BATCH_BYTES_MAX,
            measure=lambda job: len(job.payload),
            drops_gone=True,
        )

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Like the queue's own: after an error it is unknown which of these jobs are stored."""
        return await self._submits(jobs)


class RedisWarnings:
    """Settings of a Redis that would lose or refuse jobs, for the overview; asked once a minute."""

    def __init__(self, redis: Redis | None) -> None:
        self._redis = redis
        self._asked_s = float("-inf")
        self._found: list[Warn] = []

    async def __call__(self) -> list[Warn]:
        if self._redis is not None and time.monotonic() - self._asked_s > _WARNINGS_CACHE_S:
            self._asked_s = time.monotonic()
            self._found = await _redis_warnings(self._redis)
        return self._found


async def _redis_warnings(redis: Redis) -> list[Warn]:
    try:
        persistence, memory = await redis.pipeline([("INFO", "persistence"), ("INFO", "memory")])
    except StoreError:
        return []
    found: list[Warn] = []
    if b"aof_enabled:0" in persistence:
        text = "appendonly is off: a crash of the store loses the jobs of the last minutes"
        found.append(Warn("Redis", text, "redis-cli CONFIG SET appendonly yes"))
    if b"maxmemory_policy:" in memory and b"maxmemory_policy:noeviction" not in memory:
        text = "maxmemory-policy lets the store throw jobs away when it is full"
        found.append(Warn("Redis", text, "redis-cli CONFIG SET maxmemory-policy noeviction"))
    return found
