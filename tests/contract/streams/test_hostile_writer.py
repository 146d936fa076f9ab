"""S-35, S-36: a hostile program writes into every key, and good jobs run all the same."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import pytest
import redis.asyncio

from tenure import NewJob, Retry, Worker, task
from tenure.core.seam import Query
from tests.contract.streams.hostile import Hostile
from tests.waiting import until

LEASE_MS = 6_000
ROUNDS = 200


@pytest.mark.alone
@pytest.mark.clause("S-35", "S-36", "S-37")
@pytest.mark.parametrize("seed", [1, 2])
async def test_no_good_job_is_lost_doubled_or_late_beside_a_hostile_writer(bench, seed):
    runs: Counter[str] = Counter()
    done_s: dict[str, float] = {}

    @task("good")
    async def good(job):
        if job.id.startswith("bad") or not job.id.startswith("good"):
            return None
        runs[job.id] += 1
        if job.id.endswith("retry") and job.attempt == 1:
            raise Retry(after_s=0.05)
        done_s[job.id] = time.monotonic()
        return job.id

    raw = redis.asyncio.Redis.from_url(bench.server.url)
    hostile = Hostile(raw, bench.ns, seed)
    worker_url = bench.url(lease_ms=LEASE_MS, retry_delay_ms=20)
    workers = [Worker([good], queues=[worker_url], concurrency=8) for _ in range(2)]
    serving = [asyncio.create_task(worker.serve()) for worker in workers]
    queue, ledger = bench.queue("gateway"), bench.ledger()
    sent_s: dict[str, float] = {}
    choose = random.Random(seed)
    for n in range(ROUNDS):
        name = f"good-{n}" + ("-retry" if n % 5 == 0 else "")
        delay_ms = choose.choice((0, 0, 0, 30))
        job = NewJob(
            task="good", payload=b"{}", job_id=name, delay_ms=delay_ms, max_attempts=3,
            idempotency_key=f"key-{n % 50}-{n}",
        )  # fmt: skip
        (stored,) = await queue.submit([job])
        assert stored.status == "created"
        sent_s[name] = time.monotonic()
        await hostile.once()
        if n % 10 == 0:  # what people look at
            await ledger.counts()
            await ledger.find(Query(limit=50))
            await ledger.workers()
            await bench.journal().read(limit=100_000)

    async def all_done() -> bool:
        return {(await ledger.get(name)).state for name in sent_s} == {"done"}

    await until(all_done, "every good job is done", within_s=30)
    for worker in workers:
        worker.stop()
    assert await asyncio.gather(*serving) == [0, 0]
    await raw.aclose()
    doubled = {name: n for name, n in runs.items() if n != (2 if name.endswith("retry") else 1)}
    assert not doubled
    slowest_ms = max(done_s[name] - sent_s[name] for name in sent_s) * 1000
    assert slowest_ms < LEASE_MS + 1_500, slowest_ms
    kept = await bench.outside.xlen(bench.key("jobs:quarantine"))
    assert kept > 0
