"""Node workers and ours on one queue, killed again and again: every job is finished once."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import redis

from tenure.contracts.bullmq import open_producer
from tests.interop.bullmq.peer import Node
from tests.waiting import until

ROOT = Path(__file__).parents[3]
# In CI the kills come closer together; the whole proof is TENURE_RIVAL_JOBS=20000.
JOBS = int(os.environ.get("TENURE_RIVAL_JOBS", "6000"))
KILLS = 10
LOCK_MS = 1_000


def our_worker(url: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.interop.bullmq.rival", url]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)


async def node_worker(port: int, queue: str) -> Node:
    node = Node(6, port)
    options = {
        "concurrency": 50,
        "lockDuration": LOCK_MS,
        "stalledInterval": 500,
        "maxStalledCount": 50,
    }
    await node.aask(do="work", queue=queue, options=options)
    return node


@pytest.mark.few
@pytest.mark.timeout(300)
@pytest.mark.clause("B-8", "B-18", "B-28")
async def test_rivals_that_are_killed_finish_every_job_once(
    port: int, name: str, url: str, raw: redis.Redis
) -> None:
    rng = random.Random(11)
    producer = open_producer(url)
    await producer.add_bulk([("work", {"ms": 15, "result": n}, {}) for n in range(JOBS)])
    await producer.close()
    raw.hset(f"bull:{name}:meta", "opts.maxLenEvents", 10 * JOBS)
    ours_url = f"{url}&lease_ms={LOCK_MS}&stalled_max=50&stalled_ms=500"
    ours, node = our_worker(ours_url), await node_worker(port, name)
    kills = Counter[str]()
    try:
        for n in range(KILLS):
            done = JOBS * (n + 1) * 0.7 / KILLS
            await until(
                lambda done=done: raw.zcard(f"bull:{name}:completed") >= done,  # type: ignore[misc]
                f"{done:.0f} jobs",
                within_s=60,
            )
            if rng.random() < 0.5:
                ours.kill()
                ours.wait()
                ours = our_worker(ours_url)
                kills["ours"] += 1
            else:
                await asyncio.to_thread(node.kill)
                node = await node_worker(port, name)
                kills["node"] += 1
        await until(lambda: raw.zcard(f"bull:{name}:completed") == JOBS, "all jobs", within_s=90)
    finally:
        ours.kill()
        ours.wait()
        await asyncio.to_thread(node.close)
    assert kills["ours"] and kills["node"]  # noqa: PT018
    assert raw.llen(f"bull:{name}:active") == raw.llen(f"bull:{name}:wait") == 0
    assert raw.zcard(f"bull:{name}:failed") == raw.zcard(f"bull:{name}:delayed") == 0
    ends = Counter(
        fields[b"jobId"]
        for _, fields in raw.xrange(f"bull:{name}:events")
        if fields[b"event"] == b"completed"
    )
    assert len(ends) == JOBS
    assert set(ends.values()) == {1}
    stalled = sum(
        int(count or 0)
        for count in (raw.hget(f"bull:{name}:{each + 1}", "stc") for each in range(JOBS))
    )
    assert stalled > 0, "the kills hit nothing"
