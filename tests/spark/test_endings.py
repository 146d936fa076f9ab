"""A capture that is interrupted, or whose Java dies, says so in a line and leaves a sound lake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tenure.cli.console import Exit
from tenure.pipeline.capture import capture
from tenure.pipeline.lake import Lake
from tests.spark.typing_commands import HERE, ROOT
from tests.spark.working import as_rows, journal_of, lake_rows, without_place, work

PATIENCE_S = 240


def java_of(pid: int) -> int:
    """The Java process that a program started."""
    done = subprocess.run(["pgrep", "-P", str(pid), "java"], capture_output=True, text=True)
    (found,) = done.stdout.split()
    return int(found)


@pytest.mark.parametrize("ending", ["Ctrl-C", "Java is killed"])
@pytest.mark.timeout(900)
async def test_an_end_is_told_in_a_line_and_the_next_capture_goes_on(
    spark: SparkSession, lake: str, streams_url: str, tmp_path: Path, ending: str
) -> None:
    await work(streams_url, 10)
    command = [sys.executable, "-m", "tenure.cli", "pipeline", "capture", "-q", streams_url]
    program = subprocess.Popen(
        [*command, "--lake", lake, "--every", "0.2", *HERE],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while sum(Lake(lake).journals().values()) < 30:
            assert program.poll() is None, program.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.1)  # another process writes it
        if ending == "Ctrl-C":
            os.killpg(program.pid, signal.SIGINT)  # as a terminal does
        else:
            os.kill(java_of(program.pid), signal.SIGKILL)
        out, err = program.communicate(timeout=PATIENCE_S)
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
    assert "Traceback" not in err + out
    last = err.strip().splitlines()[-1]
    if ending == "Ctrl-C":
        assert (program.returncode, last) == (
            Exit.OK,
            "stopped; the next capture goes on from here",
        )
    else:
        assert program.returncode == Exit.ERROR
        assert "the Java process of Spark has ended" in last
    await work(streams_url, 5, prefix="more")
    assert capture(spark, lake, [streams_url], once=True).events == 15
    assert without_place(lake_rows(lake)) == as_rows(await journal_of(streams_url))
