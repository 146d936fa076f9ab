"""Keeps sample jobs flowing for a first look: about two a second, of all six tasks.

Most succeed, some need a second attempt, some fail for good. It steps back when nobody works them
off, and it never sends a sample to a task that has been given a real model.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from leasehold.core.errors import StoreError
from leasehold.core.job import NewJob
from leasehold.core.opening import open_ledger, open_queue

PER_S = 2.0
_WAITING_MAX = 30
_TTL_MS = 3_600_000
_PAYLOADS: dict[str, dict[str, Any]] = {
    "chat": {"prompt": "Say hello to whoever watches."},
    "plan": {"goal": "See a job from submit to done"},
    "code": {"prompt": "Print the numbers one to ten", "language": "Python"},
    "tool": {"tool": "none", "args": {}},
    "rag": {"question": "What is a lease?", "documents": ["A lease runs out by itself."]},
    "embed": {"input": ["work is never owned", "only leased"]},
}


async def keep_sampling(queue_url: str, tasks: Sequence[str], say: Callable[[str], None]) -> None:
    """Submit sample jobs until cancelled; a store that is away is waited for."""
    if not tasks:
        return
    queue, ledger = open_queue(queue_url, worker_id="leasehold-sampler"), open_ledger(queue_url)
    chance = random.Random()
    away, number = False, 0
    try:
        while True:
            try:
                if (await ledger.counts()).states.get("queued", 0) < _WAITING_MAX:
                    await queue.submit([sample_job(tasks[number % len(tasks)], chance)])
                    number += 1
                away = False
            except StoreError as error:
                if not away:
                    say(f"samples pause: {error}")
                away = True
            await asyncio.sleep(min(chance.expovariate(PER_S), 2.0) if not away else 1.0)
    finally:
        await queue.close()
        await ledger.close()


def sample_job(task: str, chance: random.Random) -> NewJob:
    """One sample job; four in a hundred fail for good, twelve need a second attempt."""
    draw = chance.random()
    play = {
        "steps": chance.randint(3, 12),
        "delay_s": round(chance.uniform(0.02, 0.25), 3),
        "fail": 9 if draw < 0.04 else 1 if draw < 0.16 else 0,
    }
    payload = msgspec.json.encode({**_PAYLOADS[task], "sample": play})
    return NewJob(task=task, payload=payload, ttl_ms=_TTL_MS)
