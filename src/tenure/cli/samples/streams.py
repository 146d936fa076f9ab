"""Sample jobs of the `streams` contract: about two a second, of all six tasks.

A task that has been given a real model gets none.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from tenure.cli.samples.flow import Place, SampleFlow, Stores
from tenure.cli.samples.pace import failures, keep_submitting
from tenure.core.job import NewJob
from tenure.core.registry import open_ledger, open_queue
from tenure.tasks import TASKS

_PER_S = 2.0
_TTL_MS = 3_600_000
_PAYLOADS: dict[str, dict[str, Any]] = {
    "chat": {"prompt": "Say hello to whoever watches."},
    "plan": {"goal": "See a job from submit to done"},
    "code": {"prompt": "Print the numbers one to ten", "language": "Python"},
    "tool": {"tool": "none", "args": {}},
    "rag": {"question": "What is a lease?", "documents": ["A lease runs out by itself."]},
    "embed": {"input": ["work is never owned", "only leased"]},
}


def queue_url(stores: Stores) -> str:
    """The queue that the gateway's /v1/jobs feeds as well."""
    return f"streams+{stores.redis_url}"


async def feed(place: Place) -> None:
    """Submit samples of every task that has no real handler."""
    if place.real:
        named = ", ".join(name for name in TASKS if name in place.real)
        place.say(f"no samples for {named}: these have real handlers")
    tasks = [name for name in TASKS if name not in place.real]
    if not tasks:
        return
    url, chance = queue_url(place.stores), random.Random()
    queue, ledger = open_queue(url, worker_id="tenure-samples"), open_ledger(url)

    async def submit(number: int) -> None:
        await queue.submit([sample_job(tasks[number % len(tasks)], chance)])

    async def waiting() -> int:
        return (await ledger.counts()).states.get("queued", 0)

    try:
        await keep_submitting(submit, waiting, per_s=_PER_S, chance=chance, say=place.say)
    finally:
        await queue.close()
        await ledger.close()


def sample_job(task: str, chance: random.Random) -> NewJob:
    """One sample job; its payload says how its handler shall behave."""
    play = {
        "steps": chance.randint(3, 12),
        "delay_s": round(chance.uniform(0.02, 0.25), 3),
        "fail": failures(chance),
    }
    payload = msgspec.json.encode({**_PAYLOADS[task], "sample": play})
    return NewJob(task=task, payload=payload, ttl_ms=_TTL_MS)


FLOW = SampleFlow("streams", queue_url, feed)
