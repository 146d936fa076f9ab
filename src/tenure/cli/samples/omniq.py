"""Sample jobs of the `omniq` contract: letters of five tenants, each tenant a group with a limit.

One tenant writes far more than the others. Watch the queue: never do more than two of its letters
go out at once, and the others do not wait behind it.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tenure.cli.samples.flow import Place, SampleFlow, Stores
from tenure.cli.samples.pace import failures, keep_submitting
from tenure.contracts.omniq import Client
from tenure.core.registry import open_ledger
from tenure.worker.job import Job
from tenure.worker.task import task

QUEUE = "letters"
GROUP_LIMIT = 2
_PER_S = 2.0
_TENANTS = ("acme", "acme", "acme", "acme", "birch", "cedar", "dune", "elm")


def queue_url(stores: Stores) -> str:
    """An OmniQ queue, found by its name by every OmniQ client."""
    return f"omniq+{stores.redis_url}?queue={QUEUE}"


@task(QUEUE, timeout_s=60)
async def send_letter(job: Job) -> dict[str, Any]:
    """Send no letter: take a moment, and say that it is a sample."""
    play = job.payload.get("sample", {})
    await asyncio.sleep(min(play.get("seconds", 0.2), 5))
    if job.attempt <= play.get("fail", 0):
        raise SampleFailure("this letter was asked to fail")
    return {"sample": True, "tenant": job.payload.get("tenant", "")}


class SampleFailure(Exception):
    """The failure that a sample job was asked for."""

    code = "sample_failure"


async def feed(place: Place) -> None:
    """Publish letters until cancelled."""
    chance = random.Random()
    client, ledger = Client(place.stores.redis_url), open_ledger(queue_url(place.stores))

    async def submit(number: int) -> None:
        tenant = chance.choice(_TENANTS)
        await client.publish(
            QUEUE,
            sample_letter(tenant, number, chance),
            gid=tenant,
            group_limit=GROUP_LIMIT,
            backoff_ms=500,
            backoff="exponential",
        )

    async def waiting() -> int:
        return (await ledger.counts()).states["wait"]

    try:
        await keep_submitting(submit, waiting, per_s=_PER_S, chance=chance, say=place.say)
    finally:
        await client.close()
        await ledger.close()


def sample_letter(tenant: str, number: int, chance: random.Random) -> dict[str, Any]:
    """A letter, and how its handler shall behave."""
    play = {"seconds": round(chance.uniform(0.1, 1.5), 2), "fail": failures(chance)}
    return {"tenant": tenant, "to": f"reader-{number}@{tenant}.test", "sample": play}


FLOW = SampleFlow("omniq", queue_url, feed, (send_letter,))
