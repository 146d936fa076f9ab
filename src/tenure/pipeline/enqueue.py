"""Enqueue: submits the rows of a file as jobs, each once, however often it is started.

The same file, task and queue are the same run, so a second start only submits what the first did
not. Another `run` submits the same rows again. A row is identified by its key columns. Without key
columns it is identified by its content and its number among rows of equal content, so that equal
rows are separate jobs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from tenure.core.errors import UsageError
from tenure.core.journal import SqlFormat
from tenure.core.registry import journal_format
from tenure.pipeline.session import one_line
from tenure.pipeline.source.writing import Tally, submit_columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

TASKS = 8
CONTROL = {"priority": "int", "delay_ms": "bigint", "gid": "string", "max_attempts": "int"}
_TALLY_DDL = (
    "created bigint, replayed bigint, conflict bigint, invalid bigint, reasons array<string>"
)


def read_rows(spark: SparkSession, path: str) -> DataFrame:
    """Rows of a Parquet, JSON lines or CSV file or folder, by the ending."""
    bare = path.rstrip("/")
    if bare.endswith((".jsonl", ".json", ".ndjson")):
        return spark.read.json(path)
    if bare.endswith((".csv", ".tsv")):
        separator = "\t" if bare.endswith(".tsv") else ","
        return spark.read.csv(path, header=True, inferSchema=True, sep=separator)
    return spark.read.parquet(path)


def jobs_of(
    rows: DataFrame, *, task: str, run: str, key: Sequence[str] = (), payload: str = ""
) -> DataFrame:
    """Rows as jobs: id, task, payload and the given options; uses only native expressions."""
    missing = sorted({*key, *([payload] if payload else [])} - set(rows.columns))
    if missing:
        raise UsageError(f"there is no column {missing[0]!r}; there are {', '.join(rows.columns)}")
    body = [name for name in rows.columns if name not in CONTROL]
    if key:
        known = rows.withColumn("__id", job_id_of(run, key))
    else:
        twins = Window.partitionBy(F.md5(content_of(rows))).orderBy(F.lit(1))
        numbered = rows.withColumn("__nth", F.row_number().over(twins))
        known = numbered.withColumn("__id", job_id_of(run, [*body, "__nth"])).drop("__nth")
    return jobs_by_id(known, task=task, job_id="__id", payload=payload)


def jobs_by_id(rows: DataFrame, *, task: str, job_id: str, payload: str = "") -> DataFrame:
    """Rows as jobs whose ids are in the column `job_id`."""
    content = content_of(rows.drop(job_id))
    control = [
        F.col(name).cast(kind).alias(name) for name, kind in CONTROL.items() if name in rows.columns
    ]
    return rows.select(
        F.col(job_id).alias("job_id"),
        F.lit(task).alias("task"),
        (F.col(payload) if payload else content).alias("payload"),
        *control,
    )


def content_of(rows: DataFrame) -> Column:
    """A row as the payload of its job: all columns but those that are options of the job."""
    body = [name for name in rows.columns if name not in CONTROL]
    return F.to_json(F.struct(*body), {"ignoreNullFields": "false"})


def job_id_of(run: str, key: Sequence[str]) -> Column:
    """The id of a row, determined by run and key; every contract accepts it."""
    known = F.to_json(F.struct(*key), {"ignoreNullFields": "false"})
    return _uuid(F.md5(F.concat(F.lit(f"{run}\n"), known)))


def run_name(path: str, task: str, url: str) -> str:
    """The run of the same file, task and queue."""
    return hashlib.sha256(f"{path}\n{task}\n{url}".encode()).hexdigest()[:16]


def enqueue(jobs: DataFrame, url: str, *, rate: float = 0.0, tasks: int = TASKS) -> Tally:
    """Submit the jobs of `jobs_of` to a queue, and count the answers."""

    def put(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        tally = submit_columns(url, batches, rate=rate / tasks)
        yield pa.RecordBatch.from_pylist([msgspec.to_builtins(tally)])

    total = Tally()
    # By id: as even as round robin, and repeatable without a sort.
    parts = jobs.repartition(tasks, "job_id")
    if isinstance(journal_format(url), SqlFormat):
        # Inserting sorted ids into an index is much cheaper than inserting random ones.
        parts = parts.sortWithinPartitions("job_id")
    with one_line():
        for row in parts.mapInArrow(put, _TALLY_DDL).collect():
            total.add(msgspec.convert(row.asDict(), Tally))
    return total


def _uuid(hexadecimal: Column) -> Column:
    """32 hexadecimal digits as a UUID, which every contract accepts as an id."""
    # As bytes: `substring` of a string scans it from the start each time.
    digits, dash = hexadecimal.cast("binary"), F.lit(b"-")
    cuts = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))
    first, *others = (F.substring(digits, start, length) for start, length in cuts)
    return F.concat(first, *(part for other in others for part in (dash, other))).cast("string")
