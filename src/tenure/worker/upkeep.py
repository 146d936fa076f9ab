"""Calls a queue's upkeep now and then, beside the handlers: promote, reclaim, trim."""

from __future__ import annotations

import asyncio
from random import Random

from tenure.worker.source import Source
from tenure.worker.watching import Watch


async def keep_up(source: Source, *, interval_ms: int, rng: Random, watch: Watch) -> None:
    """Upkeep at once, which also is the first contact, then every `interval_ms`, jittered."""
    while True:
        try:
            await source.queue.upkeep()
        except Exception as error:
            source.contact.failed("upkeep", error)
        else:
            if source.contact.made("upkeep"):
                watch.tell("contact")
            source.note_quarantined()
            watch.tell("upkeep")
        await asyncio.sleep(interval_ms / 1000 * (0.75 + rng.random() / 2))
