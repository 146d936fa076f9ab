"""Samples for `tenure up`: letters of five tenants, each tenant a group with a limit.

One tenant writes far more than the others. Never more than two of its letters run at once, and the
others do not wait behind it.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tenure.contracts.omniq.client import Client
from tenure.samples import (
    SampleContext,
    SampleFailure,
    SampleFlow,
    SampleJob,
    Stores,
    failures,
    keep_submitting,
)

_LETTERS = "letters"
_TENANTS = ("acme", "acme", "acme", "acme", "birch", "cedar", "dune", "elm")


def _queue_url(stores: Stores) -> str:
    return f"omniq+{stores.redis_url}?queue={_LETTERS}"


async def _send_letter(job: SampleJob) -> dict[str, Any]:
    """Send no letter: take a moment, and say that it is a sample."""
    play = job.payload.get("sample", {})
    await asyncio.sleep(min(play.get("seconds", 0.2), 5))
    if job.attempt <= play.get("fail", 0):
        raise SampleFailure("this letter was asked to fail")
    return {"sample": True, "tenant": job.payload.get("tenant", "")}


async def _produce(context: SampleContext) -> None:
    chance, client = random.Random(), Client(context.stores.redis_url)

    async def submit(number: int) -> None:
        tenant = chance.choice(_TENANTS)
        play = {"seconds": round(chance.uniform(0.1, 1.5), 2), "fail": failures(chance)}
        letter = {"tenant": tenant, "to": f"reader-{number}@{tenant}.test", "sample": play}
        retry: dict[str, Any] = {"backoff_ms": 500, "backoff": "exponential"}
        await client.publish(_LETTERS, letter, gid=tenant, group_limit=2, **retry)

    try:
        url = _queue_url(context.stores)
        await keep_submitting(context, url, submit, waiting=["wait"], per_s=2.0)
    finally:
        await client.close()


FLOWS = (
    SampleFlow(
        contract="omniq",
        rank=3,
        queue_url=_queue_url,
        produce=_produce,
        handlers={_LETTERS: _send_letter},
    ),
)
