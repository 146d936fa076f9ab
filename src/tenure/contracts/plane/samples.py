"""Samples for `tenure up`: reports in two streams, of which `reports:now` goes first.

The gateway is the plane, and the worker works over HTTP. The feeder writes to the database.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any
from urllib.parse import quote

import msgspec

from tenure.core.job import NewJob
from tenure.samples import (
    KEEP_MS,
    SampleContext,
    SampleFlow,
    SampleJob,
    Stores,
    failures,
    fill_queue,
)

_STREAMS = ("reports:now", "reports:later")


def _queue_url(stores: Stores) -> str:
    query = f"streams={','.join(_STREAMS)}&keep_ms={KEEP_MS}&lease_ms=30000"
    return f"plane+{stores.database('plane.db')}?{query}"


def _worker_url(stores: Stores) -> str:
    """The same plane through the gateway: all that a worker needs to reach."""
    query = f"streams={','.join(_STREAMS)}&key_file={quote(str(stores.worker_key))}"
    return f"plane+{stores.gateway_url}?{query}"


def _hint(stores: Stores) -> str:
    return f"work from bash  examples/plane_worker.sh {stores.gateway_url} {_STREAMS[1]} cat"


async def _write_report(job: SampleJob) -> dict[str, Any]:
    """Write a report: some pages, a failure where the sample asks for one, artifacts."""
    play = job.payload
    began_s = asyncio.get_running_loop().time()
    for page in range(play["pages"]):
        await asyncio.sleep(play["delay_s"])
        await job.report(round(100 * (page + 1) / play["pages"]), f"page {page + 1}")
    if job.attempt <= play["fail"]:
        raise RuntimeError("the printer is out of paper")
    took_ms = round((asyncio.get_running_loop().time() - began_s) * 1000)
    return {
        "artifacts": [{"name": "report.txt", "pages": play["pages"]}],
        "timings": {"write_ms": took_ms},
    }


async def _produce(context: SampleContext) -> None:
    chance = random.Random()

    def make(number: int) -> NewJob:
        payload = {
            "pages": chance.randint(2, 6),
            "delay_s": round(chance.uniform(0.05, 0.3), 3),
            "fail": failures(chance),
        }
        stream = _STREAMS[0] if number % 4 == 0 else _STREAMS[1]
        raw = msgspec.json.encode(payload)
        return NewJob(task="report", payload=raw, max_attempts=3, options={"stream": stream})

    await fill_queue(context, _queue_url(context.stores), make, waiting=["QUEUED"], per_s=1.0)


FLOWS = (
    SampleFlow(
        contract="plane",
        rank=4,
        queue_url=_queue_url,
        produce=_produce,
        handlers={"report": _write_report},
        hint=_hint,
        worker_url=_worker_url,
    ),
)
