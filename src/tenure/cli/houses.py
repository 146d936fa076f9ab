"""Queues by URL for the commands that look at several at once, in the dashboard's terms."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tenure.cli.config import load_config
from tenure.core.registry import open_journal, open_ledger, open_queue, parse_url
from tenure.core.seam import Journal, Ledger, Queue
from tenure.dashboard.house import Street
from tenure.worker.telemetry import ensure_logs


@dataclass(frozen=True, slots=True)
class OpenHouse:
    """One queue; nothing connects before it is asked something."""

    name: str
    contract: str
    queue: Queue
    ledger: Ledger
    journal: Journal
    address: str = ""
    outbox: Ledger | None = None


def chosen_urls(queue_urls: Sequence[str]) -> list[str]:
    """The queues that were named, else those of the settings."""
    config = load_config()
    return list(queue_urls) or config.texts("worker.queues") or [config.text("queue_url")]


@asynccontextmanager
async def open_street(urls: Sequence[str]) -> AsyncIterator[Street]:
    """The queues behind these URLs, until the block ends."""
    ensure_logs()
    houses = [_house(url, number, urls) for number, url in enumerate(urls)]
    try:
        yield Street(houses)
    finally:
        for house in houses:
            for part in (house.queue, house.ledger, house.journal):
                await part.close()


def _house(url: str, number: int, urls: Sequence[str]) -> OpenHouse:
    parsed = parse_url(url)
    same = sum(parse_url(other).name == parsed.name for other in urls[:number])
    name = f"{parsed.name}~{same + 1}" if same else parsed.name
    parts = open_queue(url), open_ledger(url), open_journal(url)
    return OpenHouse(name, parsed.contract, *parts, address=parsed.safe)
