"""Spark's daemon (`spark.python.daemon.module`), with the imports of its workers done beforehand.

Spark forks a Python process for each task. The children share what the daemon has imported; else
each of them would spend a second on it.
"""

from __future__ import annotations

from importlib import import_module

from pyspark.daemon import manager

PRELOADED = (
    *("numpy", "pandas", "pyarrow.compute", "pyarrow.csv", "pyarrow.parquet", "pyspark.worker"),
    *("pyspark.sql.conversion", "pyspark.sql.pandas.serializers", "pyspark.sql.pandas.types"),
    *("tenure.pipeline.delta_rs", "tenure.pipeline.source.journal"),
    *("tenure.pipeline.source.stream_reader", "tenure.pipeline.source.writing"),
)

if __name__ == "__main__":
    for name in PRELOADED:
        import_module(name)
    manager()
