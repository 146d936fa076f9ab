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

from tenure.pipeline.session import find_java, runtime_folder
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
from tenure.pipeline.report.figures import figures_of
from tenure.pipeline.report.page import page
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
def places(batches):  # where executors import the package from
    import pyarrow, tenure
    for batch in batches:
        yield pyarrow.RecordBatch.from_pylist([{"path": tenure.__file__}])
rows = spark.range(8, numPartitions=8).mapInArrow(places, "path string")
paths = {row.path for row in rows.collect()}
assert all("tenure.zip" in path for path in paths), paths
assert "Throughput" in page(figures_of(spark, lake))
executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
print("RESULT", captured.events, len(days), audited.violations, audited.jobs, tally.created,
      executors)
"""


def start(kind: str, log: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a master or a worker; it tells its life in a file."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = clean | {
        "JAVA_HOME": str(find_java(os.environ, runtime_folder(os.environ))),
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
def bare_python(tmp_path: Path) -> str:
    """A Python that has the libraries and not this package: `-S` reads no links to its source."""
    program = tmp_path / "python"
    folder = Path(pyspark.__file__).parents[1]
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{folder}" exec {sys.executable} -S "$@"\n'
    )
    program.chmod(0o700)
    lacks = subprocess.run([program, "-c", "import tenure"], capture_output=True, cwd=tmp_path,
                           env={"PATH": os.environ["PATH"]})  # fmt: skip
    assert b"No module named 'tenure'" in lacks.stderr
    return str(program)


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
async def test_two_workers_without_the_package_do_all_that_local_does(
    master: str, bare_python: str, lake: str, redis: EmbeddedRedis, streams_url: str
) -> None:
    await work(streams_url, 20, fail_every=9)
    events = await journal_of(streams_url)
    done = subprocess.run(
        [sys.executable, "-c", STEPS, master, lake, streams_url],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "SPARK_LOCAL_IP": "127.0.0.1",  # the machine's own name may have no address
            "PYSPARK_PYTHON": bare_python,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
        },
        capture_output=True, text=True, timeout=480,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert result == f"RESULT {len(events)} 1 0 20 20 2"
    assert len(lake_rows(lake)) == len(events)
