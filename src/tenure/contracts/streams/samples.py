"""Samples for `tenure up`: about two jobs a second, of all six tasks."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from tenure.core.job import NewJob
from tenure.samples import KEEP_MS, SampleContext, SampleFlow, Stores, failures, fill_queue

_PAYLOADS: dict[str, dict[str, Any]] = {
    "chat": {"prompt": "Say hello to whoever watches."},
    "plan": {"goal": "See a job from submit to done"},
    "code": {"prompt": "Print the numbers one to ten", "language": "Python"},
    "tool": {"tool": "none", "args": {}},
    "rag": {"question": "What is a lease?", "documents": ["A lease runs out by itself."]},
    "embed": {"input": ["work is never owned", "only leased"]},
}


def _queue_url(stores: Stores) -> str:
    return f"streams+{stores.redis_url}"


async def _produce(context: SampleContext) -> None:
    """Submit jobs of the tasks that have no real handler."""
    if context.real:
        named = ", ".join(name for name in _PAYLOADS if name in context.real)
        context.say(f"no samples for {named}: these have real handlers")
    tasks = [name for name in _PAYLOADS if name not in context.real]
    if tasks:
        chance = random.Random()
        await fill_queue(
            context,
            _queue_url(context.stores),
            lambda number: sample(tasks[number % len(tasks)], chance),
            waiting=["queued"],
            per_s=2.0,
        )


def sample(task: str, chance: random.Random) -> NewJob:
    """A job whose payload says how its sample handler shall behave."""
    play = {
        "steps": chance.randint(3, 12),
        "delay_s": round(chance.uniform(0.02, 0.25), 3),
        "fail": failures(chance),
    }
    payload = msgspec.json.encode({**_PAYLOADS[task], "sample": play})
    return NewJob(task=task, payload=payload, ttl_ms=KEEP_MS)


FLOWS = (SampleFlow(contract="streams", rank=1, queue_url=_queue_url, produce=_produce),)
