"""All contracts write their journals, one capture follows them all, and its driver is killed again
and again: the lake equals the journals, event for event.

Real stores throughout: Redis, SQLite, PostgreSQL; Node's own BullMQ adds and works beside us.
Once here, since every start of Spark takes its time; TENURE_SPARK_KILLS=10 for the whole proof.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import pytest
from pyspark.sql import SparkSession

from tenure.pipeline.audit.lakes import audit_lake
from tenure.pipeline.capture import capture
from tenure.pipeline.lake import Lake
from tenure.pipeline.source.offsets import journal_name
from tenure.store.embedded import EmbeddedPostgres, EmbeddedRedis
from tests.contract.inbox_stage import migrated
from tests.interop.bullmq.peer import Node, install
from tests.spark.working import as_rows, journal_of, lake_rows, without_place, work

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("TENURE_SPARK_KILLS", "1"))
PATIENCE_S = 300
JOBS = 10
PACE_S = 1.0


@pytest.fixture
async def urls(
    redis: EmbeddedRedis, postgres: EmbeddedPostgres, tmp_path: Path, bullmq_url: str
) -> list[str]:
    """A queue of every contract, and of every store that it knows."""
    schema = f"kills_{os.getpid()}"
    await migrated(postgres.url, schema)
    return [
        f"streams+{redis.url}?namespace={schema}:",
        bullmq_url,
        f"omniq+{redis.url}?queue={schema}",
        f"inbox+sqlite:///{tmp_path}/inbox.db",
        f"inbox+{postgres.url}?schema={schema}",
        f"plane+sqlite:///{tmp_path}/plane.db?streams=jobs:high,jobs:low",
        f"plane+{postgres.url}?schema={schema}&streams=jobs",
    ]


@asynccontextmanager
async def node_beside(bullmq_url: str) -> AsyncIterator[Node]:
    """Node's worker on the queue that we work on too."""
    await asyncio.to_thread(install)
    parts = urlsplit(bullmq_url.removeprefix("bullmq+"))
    node = Node(6, parts.port or 6379)
    try:
        await node.aask(do="work", queue=parts.query.partition("queue=")[2])
        yield node
    finally:
        await asyncio.to_thread(node.close)


@asynccontextmanager
async def producing(urls: list[str], node: Node) -> AsyncIterator[None]:
    """Jobs run to their end in every queue, round after round, while the block lasts."""
    stop = asyncio.Event()
    foreign = next(url for url in urls if url.startswith("bullmq")).partition("queue=")[2]

    async def by_node(number: int) -> None:
        jobs = [{"name": "n", "data": {"n": n, "round": number}} for n in range(JOBS)]
        await node.acall(f"queue:{foreign}", "addBulk", jobs)

    async def produce() -> None:
        number = 0
        while not stop.is_set():
            ours = (work(url, JOBS, prefix=f"r{number}-", fail_every=7) for url in urls)
            await asyncio.gather(*ours, by_node(number), asyncio.sleep(PACE_S))
            number += 1

    running = asyncio.create_task(produce())
    try:
        yield
    finally:
        stop.set()
        await running


async def captured_more(lake: str, than: int, driver: subprocess.Popen[bytes]) -> int:
    """Wait until the lake holds more events than that; how many it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while (rows := sum(Lake(lake).journals().values())) <= than:
            assert driver.poll() is None, "the capture ended by itself"
            await asyncio.sleep(0.02)  # another process writes it
    return rows


async def kill_again_and_again(lake: str, urls: list[str]) -> None:
    """Each driver captures something, and is killed some moments later."""
    rng, held = Random(7), 0
    for _ in range(KILLS):
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.driver", lake, *urls],
            cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        try:
            held = await captured_more(lake, held, driver)
            await asyncio.sleep(rng.uniform(0, 3))
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()


@pytest.mark.few
@pytest.mark.timeout(KILLS * PATIENCE_S + 600)
async def test_a_driver_that_is_killed_again_and_again_loses_and_doubles_nothing(
    spark: SparkSession, lake: str, urls: list[str], bullmq_url: str
) -> None:
    async with node_beside(bullmq_url) as node, producing(urls, node):
        await kill_again_and_again(lake, urls)
    capture(spark, lake, urls, once=True)
    found = lake_rows(lake)
    held = 0
    for url in urls:
        events = as_rows(await journal_of(url))
        assert len(events) >= JOBS * 3
        mine = [row for row in found if row["journal"] == journal_name(url)]
        assert without_place(mine) == events
        held += len(events)
    assert len(found) == held, "the lake holds something that no journal has"
    assert Lake(lake).gaps() == []
    assert audit_lake(spark, lake).violations == 0
