"""Spark's own parent of Python workers, with everything they need already imported.

Spark forks a Python process for each task and each planning step. What the parent has imported
costs its children nothing; else each of them would spend a second on it.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet
import pyspark.sql.conversion
import pyspark.sql.pandas.serializers
import pyspark.sql.pandas.types
import pyspark.sql.worker.plan_data_source_read
from pyspark.daemon import manager

import leasehold.pipeline.lake.feed
import leasehold.pipeline.lake.sink
import leasehold.pipeline.source.journal
import leasehold.pipeline.source.stream_reel

PRELOADED = (np, pd, pyarrow, pyspark, leasehold)

if __name__ == "__main__":
    manager()
