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

from leasehold.pipeline.java import find_java
from leasehold.pipeline.session import runtime_folder
from leasehold.store.embedded import EmbeddedRedis
from tests.spark.working import journal_of, lake_rows, work

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(pyspark.__file__).parent
STEPS = """
import sys
from leasehold.pipeline import SparkSettings, open_session
from leasehold.pipeline.audit.lakes import audit_lake
from leasehold.pipeline.capture import capture
from leasehold.pipeline.enqueue import enqueue, jobs_of
from leasehold.pipeline.tables.update import update_tables
master, lake, url = sys.argv[1:]
spark = open_session(SparkSettings(
    master=master, driver_memory="1g", quick=True, ship=True,
    conf={"spark.sql.shuffle.partitions": "2", "spark.cores.max": "2", "spark.executor.cores": "1",
          "spark.executor.memory": "512m", "spark.driver.host": "127.0.0.1",
          "spark.driver.bindAddress": "127.0.0.1"}))
captured = capture(spark, lake, [url], once=True, parts=2)
days = update_tables(spark, lake).days
audited = audit_lake(spark, lake)
jobs = jobs_of(spark.range(20).selectExpr("id as n"), task="later", run="r", key=["n"])
tally = enqueue(jobs, url, tasks=2)
print("RESULT", captured.events, len(days), audited.violations, audited.jobs, tally.created)
"""


def start(kind: str, *words: str) -> tuple[subprocess.Popen[str], str]:
    """Start a master or a worker and wait until it says that it is up; its log so far."""
    environment = os.environ | {
        "JAVA_HOME": str(find_java(os.environ, runtime_folder(os.environ))),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_HOME": str(HOME),
        "SPARK_DAEMON_MEMORY": "256m",
    }
    name = f"org.apache.spark.deploy.{kind}"
    process = subprocess.Popen(
        [HOME / "bin" / "spark-class", name, *words],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    seen, deadline_s = "", time.monotonic() + 120
    while time.monotonic() < deadline_s:
        line = process.stderr.readline()
        seen += line
        if "I have been elected leader" in line or "Successfully registered with master" in line:
            return process, seen
        assert line, seen
    raise TimeoutError(seen)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    processes = []
    try:
        first, seen = start("master.Master", "-h", "127.0.0.1", "-p", "0", "--webui-port", "0")
        processes.append(first)
        found = re.search(r"spark://127\.0\.0\.1:\d+", seen)
        assert found, seen
        for number in (1, 2):
            worker, _ = start(
                "worker.Worker", "-h", "127.0.0.1", "-c", "1", "-m", "600m", "--webui-port", "0",
                "-d", str(tmp_path / f"worker{number}"), found.group(),
            )  # fmt: skip
            processes.append(worker)
        yield found.group()
    finally:
        for process in reversed(processes):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=30)


@pytest.mark.alone
@pytest.mark.timeout(600)
async def test_two_workers_capture_count_audit_and_enqueue(
    master: str, lake: str, redis: EmbeddedRedis, streams_url: str
) -> None:
    await work(streams_url, 60, fail_every=9)
    events = await journal_of(streams_url)
    done = subprocess.run(
        [sys.executable, "-c", STEPS, master, lake, streams_url],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True, text=True, timeout=480,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert result == f"RESULT {len(events)} 1 0 60 20"
    assert len(lake_rows(lake)) == len(events)
