"""A queue as the gateway holds it open: queue, ledger, journal and the feed over them."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, cast

from tenure.core.endpoint import Endpoint, Submits
from tenure.core.errors import UsageError
from tenure.core.job import JobEvent
from tenure.core.redaction import Redaction
from tenure.core.registry import open_journal, open_ledger, open_part, open_queue, parse_url
from tenure.core.seam import Journal, Ledger, Queue
from tenure.core.state import MACHINES
from tenure.gateway.feed import Feed
from tenure.gateway.metrics import Metrics
from tenure.gateway.reading import FollowLedger
from tenure.gateway.settings import GatewaySettings


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
