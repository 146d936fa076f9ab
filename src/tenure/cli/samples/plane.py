"""Sample jobs of the `plane` contract: the gateway is the plane, and the worker works over HTTP.

Two streams, of which `reports:now` goes first. The plane keeps its jobs in SQLite or
PostgreSQL; the producer writes next to it.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any
from urllib.parse import quote

import msgspec

from tenure.cli.samples.flow import Place, SampleFlow, Stores
from tenure.cli.samples.pace import failures, keep_submitting
from tenure.core.job import NewJob
from tenure.core.registry import open_ledger, open_queue
from tenure.worker.job import Job
from tenure.worker.task import task

TASK = "report"
STREAMS = ("reports:now", "reports:later")
_PER_S = 1.0
_KEEP_MS = 3_600_000


def queue_url(stores: Stores) -> str:
    """The plane itself, which the gateway serves."""
    query = f"streams={','.join(STREAMS)}&keep_ms={_KEEP_MS}&lease_ms=30000"
    return f"plane+{stores.database('plane.db')}?{query}"


def worker_url(stores: Stores) -> str:
    """The same plane through the gateway: all that a worker needs to reach."""
    query = f"streams={','.join(STREAMS)}&key_file={quote(str(stores.worker_key))}"
    return f"plane+{stores.gateway_url}?{query}"


def invitation(stores: Stores) -> str:
    """How to be a worker with a program of one's own."""
    return f"work from bash  examples/plane_worker.sh {stores.gateway_url} {STREAMS[1]} cat"


@task(TASK)
async def report(job: Job) -> dict[str, Any]:
    """Writes a report: some pages, a failure where the sample asks for one, artifacts."""
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


async def feed(place: Place) -> None:
    """Submit reports, one in four of them urgent."""
    url, chance = queue_url(place.stores), random.Random()
    queue, ledger = open_queue(url, worker_id="tenure-samples"), open_ledger(url)

    async def submit(number: int) -> None:
        await queue.submit([sample_job(number, chance)])

    async def waiting() -> int:
        return (await ledger.counts()).states["QUEUED"]

    try:
        await keep_submitting(submit, waiting, per_s=_PER_S, chance=chance, say=place.say)
    finally:
        await queue.close()
        await ledger.close()


def sample_job(number: int, chance: random.Random) -> NewJob:
    """One sample job; its payload says how its handler shall behave."""
    payload = {
        "pages": chance.randint(2, 6),
        "delay_s": round(chance.uniform(0.05, 0.3), 3),
        "fail": failures(chance),
    }
    stream = STREAMS[0] if number % 4 == 0 else STREAMS[1]
    return NewJob(
        task=TASK,
        payload=msgspec.json.encode(payload),
        max_attempts=3,
        options={"stream": stream},
    )


FLOW = SampleFlow(
    "plane", queue_url, feed, tasks=(report,), invitation=invitation, worker_url=worker_url
)
