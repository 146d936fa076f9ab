"""kill -9 of workers that store scheduled and chained jobs: each job is stored, and once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tenure import Client, Worker
from tenure.core.registry import open_journal
from tenure.worker.config import Settings
from tests.chaos.plan_worker import EVERY_MS, add, tick

ROOT = Path(__file__).parents[2]
LIVES = 8
SOON_S = 30.0


@pytest.fixture(params=["streams", "omniq", "inbox"])
def url(request: pytest.FixtureRequest, servers: Any, tmp_path: Path) -> str:
    name = f"plans-{os.getpid()}-{request.node.name.translate(str.maketrans('[]', '--'))}"
    match request.param:
        case "streams":
            return f"streams+{servers.redis()}?namespace={name}:&lease_ms=500"
        case "omniq":
            return f"omniq+{servers.redis()}?queue={name}&timeout_ms=500"
    return f"inbox+sqlite:///{tmp_path}/jobs.db?lease_ms=500"


@asynccontextmanager
async def worker(url: str, dies_at: str = "") -> AsyncGenerator[asyncio.subprocess.Process]:
    command = (sys.executable, "-m", "tests.chaos.plan_worker", url, dies_at)
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def submits(url: str) -> Counter[str]:
    """How often each job was stored, by the journal."""
    journal, found, after = open_journal(url), Counter[str](), ""
    try:
        while events := await journal.read(after=after):
            found.update(each.job_id for each in events if each.type == "submit")
            after = events[-1].seq
    finally:
        await journal.close()
    return found


async def ticks(url: str, count: int) -> Counter[str]:
    """What was stored, as soon as there are so many."""
    async with asyncio.timeout(SOON_S):
        while len(found := await submits(url)) < count:
            await asyncio.sleep(0.05)  # other processes store them
    return found


def check_each_once(stored: Counter[str]) -> None:
    """Every time between the first and the last has its job, once."""
    assert set(stored.values()) == {1}
    times = sorted(int(job_id.rpartition("@")[2]) for job_id in stored)
    assert times == list(range(times[0], times[-1] + 1, EVERY_MS))


@pytest.mark.timeout(120)
async def test_a_worker_killed_between_job_and_record_leaves_one_job(url: str) -> None:
    async with worker(url, "swap") as process:
        assert await asyncio.wait_for(process.wait(), SOON_S) == -signal.SIGKILL
    stored = await submits(url)
    assert stored
    async with Client(url) as client:
        (schedule,) = await client.schedules()
        assert not schedule.last_id, "it died before it could record the job"
    async with worker(url):
        check_each_once(await ticks(url, len(stored) + 5))


@pytest.mark.timeout(180)
async def test_two_workers_killed_again_and_again_store_each_time_once(url: str) -> None:
    chance = random.Random(5)
    async with worker(url):
        for life in range(LIVES):
            async with worker(url):
                await ticks(url, 3 * (life + 1))
                await asyncio.sleep(chance.random() / 4)  # die at any moment
    check_each_once(await submits(url))


@pytest.mark.timeout(120)
async def test_a_chain_whose_worker_is_killed_before_it_settles_goes_on_once(url: str) -> None:
    if url.startswith("omniq"):
        return  # it has no chains
    async with Client(url) as client:
        handle = await client.gather([add.call(n=1)], then=add.call(n=10), id="g")
        async with worker(url, "settle") as process:
            assert await asyncio.wait_for(process.wait(), SOON_S) == -signal.SIGKILL
        assert set(await submits(url)) == {"g@0.0", "g@1.0"}, "the next job was stored before"
        healthy = Worker([add, tick], queues=[url], settings=Settings(upkeep_ms=100))
        served = asyncio.ensure_future(healthy.serve())
        try:
            assert await handle.result(timeout_s=SOON_S) == 11
        finally:
            healthy.stop()
            await served
    stored = await submits(url)
    assert (stored["g@0.0"], stored["g@1.0"]) == (1, 1)
