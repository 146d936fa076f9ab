"""The driver is killed at any moment, again and again: the lake equals the journals.

Once here, since every start of Spark takes its time; LEASEHOLD_SPARK_KILLS=10 for more.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from leasehold.pipeline.audit.lakes import audit_lake
from leasehold.pipeline.capture import capture
from leasehold.pipeline.lake.files import LakeFiles
from leasehold.pipeline.lake.progress import all_progress, gaps
from tests.spark.working import as_rows, journal_of, lake_rows, without_place, work

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("LEASEHOLD_SPARK_KILLS", "1"))
PATIENCE_S = 180


async def captured_more(lake: str, than: int) -> int:
    """Wait until the lake holds more events than that; how many it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while (rows := sum(each.rows for each in all_progress(LakeFiles(lake)))) <= than:
            await asyncio.sleep(0.02)  # another process writes it
    return rows


@pytest.mark.alone
@pytest.mark.timeout(KILLS * PATIENCE_S + 300)
async def test_a_driver_that_is_killed_again_and_again_loses_and_doubles_nothing(
    spark: SparkSession, lake: str, streams_url: str, bullmq_url: str
) -> None:
    rng, urls = Random(7), [streams_url, bullmq_url]
    stop = asyncio.Event()

    async def produce() -> None:
        number = 0
        while not stop.is_set():
            for url in urls:
                await work(url, 20, prefix=f"r{number}-", fail_every=7)
            number += 1
            await asyncio.sleep(0.5)  # the pace of a producer

    producing = asyncio.create_task(produce())
    try:
        held = 0
        for _ in range(KILLS):
            driver = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.driver", lake, *urls],
                cwd=ROOT, start_new_session=True,
            )  # fmt: skip
            try:
                held = await captured_more(lake, held)
                await asyncio.sleep(rng.uniform(0, 3))
            finally:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
    finally:
        stop.set()
        await producing
    capture(spark, lake, urls, once=True)
    found = lake_rows(lake)
    for url in urls:
        events = await journal_of(url)
        mine = [row for row in found if row["queue"] == events[0].queue]
        assert without_place(mine) == as_rows(events)
    assert gaps(LakeFiles(lake)) == []
    assert audit_lake(spark, lake).violations == 0
