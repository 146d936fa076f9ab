"""The data pipeline on Spark: every event of every queue kept, counted and audited.

`source` makes any queue URL a Spark data source: `spark.read.format("tenure")`, as a stream too,
and for writing jobs. `capture` follows journals into a `lake` of Parquet files. `tables` turns the
events into attempts, jobs and hourly metrics; `audit` checks the promises over the whole history;
`enqueue` and `replay` put jobs in by the million; `mapping` runs a task over a DataFrame; `report`
draws one page. pyspark is imported only here, and only when something is asked for.
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
