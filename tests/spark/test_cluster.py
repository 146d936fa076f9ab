"""A standalone master with two workers, started from the wheel, does everything that local does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from tenure.pipeline.java import find_java
from tenure.pipeline.session import runtime_folder
from tenure.store.embedded import EmbeddedRedis
from tests.spark.working import journal_of, lake_rows, work

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(pyspark.__file__).parent
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
STEPS = """
import sys
from tenure.pipeline import SparkSettings, open_session
from tenure.pipeline.audit.lakes import audit_lake
from tenure.pipeline.capture import capture
from tenure.pipeline.enqueue import enqueue, jobs_of
from tenure.pipeline.tables.update import update_tables
from tests.spark.working import SMALL
master, lake, url = sys.argv[1:]
spark = open_session(SparkSettings(
    master=master, driver_memory="1g", quick=True, ship=True,
    conf=SMALL | {
        "spark.cores.max": "2", "spark.executor.cores": "1", "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0"}))
captured = capture(spark, lake, [url], once=True, parts=2)
days = update_tables(spark, lake).days
audited = audit_lake(spark, lake)
jobs = jobs_of(spark.range(20).selectExpr("id as n"), task="later", run="r", key=["n"])
tally = enqueue(jobs, url, tasks=2)
executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
print("RESULT", captured.events, len(days), audited.violations, audited.jobs, tally.created,
      executors)
"""


def start(kind: str, log: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a master or a worker; it tells its life in a file."""
    environment = os.environ | {
        "JAVA_HOME": str(find_java(os.environ, runtime_folder(os.environ))),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_HOME": str(HOME),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": QUICK,
    }
    command = [HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{kind}", "-h", "127.0.0.1"]
    with log.open("wb") as out:
        return subprocess.Popen(
            [*command, "--webui-port", "0", *words],
            env=environment, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip


def address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where a master listens, once it is the leader."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s and process.poll() is None:
        seen = log.read_text()
        found = re.search(r"spark://127\.0\.0\.1:\d+", seen)
        if found and "I have been elected leader" in seen:
            return found.group()
        time.sleep(0.05)  # another process writes it
    raise TimeoutError(log.read_text())


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """A master whose workers are still on their way: Spark waits for them itself."""
    processes = []
    try:
        log = tmp_path / "master.log"
        processes.append(start("master.Master", log, "-p", "0"))
        url = address(processes[0], log)
        for number in (1, 2):
            place = str(tmp_path / f"worker{number}")
            log = tmp_path / f"worker{number}.log"
            words = ("-c", "1", "-m", "600m", "-d", place, url)
            processes.append(start("worker.Worker", log, *words))
        yield url
    finally:
        for process in reversed(processes):
            os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            process.wait(timeout=30)


@pytest.mark.few
@pytest.mark.timeout(600)
async def test_two_workers_capture_count_audit_and_enqueue(
    master: str, lake: str, redis: EmbeddedRedis, streams_url: str
) -> None:
    await work(streams_url, 20, fail_every=9)
    events = await journal_of(streams_url)
    done = subprocess.run(
        [sys.executable, "-c", STEPS, master, lake, streams_url],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "SPARK_LOCAL_IP": "127.0.0.1",  # the machine's own name may have no address
        },
        capture_output=True, text=True, timeout=480,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert result == f"RESULT {len(events)} 1 0 20 20 2"
    assert len(lake_rows(lake)) == len(events)
