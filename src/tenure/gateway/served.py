"""A queue as the gateway holds it open: queue, ledger, journal and the feed over them."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Sequence
from typing import Any, cast

from tenure.core.endpoint import Endpoint
from tenure.core.errors import StoreError, UsageError
from tenure.core.intake import Submits
from tenure.core.job import JobEvent, NewJob, Submitted
from tenure.core.opening import open_journal, open_ledger, open_part, open_queue, parse_url
from tenure.core.redacting import Redaction
from tenure.core.seam import Journal, Ledger, Queue
from tenure.core.state import MACHINES
from tenure.dashboard.views import Warn
from tenure.gateway.feed import Feed, FollowLedger
from tenure.gateway.metrics import Metrics
from tenure.gateway.settings import GatewaySettings
from tenure.store.gathering import Gathering
from tenure.store.redis import Redis

_JOBS_MAX = 100
_BYTES_MAX = 1 << 20


class SubmitBatcher:
    """`submit` of the queue behind it, one call at a time."""

    def __init__(self, queue: Submits) -> None:
        self._submits: Gathering[NewJob, Submitted] = Gathering(
            queue.submit,
            items_max=_JOBS_MAX,
            size_max=_BYTES_MAX,
            measure=lambda job: len(job.payload),
            drops_gone=True,
        )

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Like the queue's own: an error means that the fate of these jobs is unknown."""
        return await self._submits(jobs)


_BELIEVE_S = 60.0


class RedisSettings:
    """The settings of one Redis; without one there is nothing to warn of."""

    def __init__(self, redis: Redis | None) -> None:
        self._redis = redis
        self._asked_s = float("-inf")
        self._found: list[Warn] = []

    async def warnings(self) -> list[Warn]:
        """What `tenure doctor` would say of it first."""
        if self._redis is not None and time.monotonic() - self._asked_s > _BELIEVE_S:
            self._asked_s = time.monotonic()
            self._found = await _ask(self._redis)
        return self._found


async def _ask(redis: Redis) -> list[Warn]:
    try:
        persistence, memory = await redis.pipeline([("INFO", "persistence"), ("INFO", "memory")])
    except StoreError:
        return []
    found = []
    if b"aof_enabled:0" in persistence:
        text = "appendonly is off: a crash of the store loses the jobs of the last minutes"
        found.append(Warn("Redis", text, "redis-cli CONFIG SET appendonly yes"))
    if b"maxmemory_policy:" in memory and b"maxmemory_policy:noeviction" not in memory:
        text = "maxmemory-policy lets the store throw jobs away when it is full"
        found.append(Warn("Redis", text, "redis-cli CONFIG SET maxmemory-policy noeviction"))
    return found


class Served:
    """One queue of one contract. `name` is what /api/queues calls it."""

    def __init__(
        self,
        name: str,
        contract: str,
        queue: Queue,
        ledger: Ledger,
        journal: Journal,
        feed: Feed,
        *,
        address: str = "",
        outbox: Ledger | None = None,
    ) -> None:
        self.name = name
        self.contract = contract
        self.queue = queue
        self.ledger = ledger
        self.journal = journal
        self.feed = feed
        self.address = address
        self.outbox = outbox

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
            **settings.lent,
        )
        if hasattr(found, "open_worker_routes"):
            routes += found.open_worker_routes(self.queue)
        return cast("list[Endpoint]", routes)

    def start(self) -> None:
        """Begin to read for followers, and what the queue itself does beside requests."""
        self.feed.start()
        begin = getattr(self.queue, "start", None)
        if begin is not None:
            begin()

    def drain(self) -> None:
        """Answer those who wait."""
        drain = getattr(self.queue, "drain", None)
        if drain is not None:
            drain()

    async def close(self) -> None:
        """Let go of everything."""
        await self.feed.close()
        for part in (self.queue, self.ledger, self.journal, self.outbox):
            if part is not None:
                await part.close()


def open_served(url: str, settings: GatewaySettings, metrics: Metrics) -> Served:
    """Open the queue behind a URL; it connects on first use."""
    parsed = parse_url(url)
    queue, ledger, journal = open_queue(url), open_ledger(url), open_journal(url)
    machine = MACHINES.get(parsed.contract)
    feed = Feed(
        _following(ledger),
        journal,
        final=machine.final if machine else (),
        sweep_ms=settings.sweep_ms,
        heartbeat_ms=settings.heartbeat_ms,
        client_bytes_max=settings.client_bytes_max,
        on_events=metrics.sse_events.inc,
        redaction=Redaction(settings.redact),
    )
    sides = queue, ledger, journal, feed
    return Served(parsed.name, parsed.contract, *sides, address=parsed.safe, outbox=_outbox(url))


def _outbox(url: str) -> Ledger | None:
    """The ledger of the events to be delivered, where the contract has them."""
    try:
        return cast("Ledger | None", open_part(url, "outbox"))
    except UsageError:
        return None


def check_names(served: Sequence[Served]) -> None:
    """Refuse two queues of one name: pages and /api could not tell them apart."""
    names = [each.name for each in served]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"two queues are called {name!r}; a gateway serves one of them, or queues whose "
                "URLs differ in `queue`"
            )


def _following(ledger: Any) -> FollowLedger:
    """The ledger itself where it can read many jobs at once, else job by job."""
    return cast("FollowLedger", ledger if hasattr(ledger, "changes") else _OneByOne(ledger))


class _OneByOne:
    """`changes` for a ledger that has only `events`."""

    def __init__(self, ledger: Ledger) -> None:
        self.get = ledger.get
        self.events = ledger.events

    async def changes(self, cursors: dict[str, str]) -> dict[str, list[JobEvent]]:
        """New events of many jobs, asked for at the same time."""
        asked = [self.events(job_id, after=after) for job_id, after in cursors.items()]
        return dict(zip(cursors, await asyncio.gather(*asked), strict=True))
