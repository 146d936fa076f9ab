"""The data pipeline on Spark: keeps, counts and audits every event of every queue.

`source` makes any queue URL a Spark data source, `spark.read.format("tenure")`, for batches,
streams and writing jobs. `capture` follows journals into a `lake` of Parquet files. `tables` turns
the events into attempts, jobs and hourly metrics; `audit` checks all invariants over the history;
`enqueue` and `replay` submit jobs in bulk; `mapping` runs a task over a DataFrame; `report` draws
one page. pyspark is imported only in this package, and only when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenure.pipeline.mapping import run_task
    from tenure.pipeline.session import SparkSettings, open_session, prepare

__all__ = ["SparkSettings", "open_session", "prepare", "run_task"]

_HOME = {
    "SparkSettings": "session",
    "open_session": "session",
    "prepare": "session",
    "run_task": "mapping",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tenure.pipeline' has no attribute {name!r}")
    return getattr(import_module(f"tenure.pipeline.{_HOME[name]}"), name)
