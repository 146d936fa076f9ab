"""A capture in a process of its own, to be killed: `python -m tests.spark.driver LAKE URL...`."""

from __future__ import annotations

import sys

from tenure.pipeline import SparkSettings, open_session
from tenure.pipeline.capture import capture
from tests.spark.working import SMALL


def main(lake: str, *urls: str) -> None:
    spark = open_session(
        SparkSettings(master="local[2]", driver_memory="1g", quick=True, conf=SMALL)
    )
    capture(spark, lake, urls, every_s=0.1, max_rows=500, parts=2)


if __name__ == "__main__":
    main(*sys.argv[1:])
