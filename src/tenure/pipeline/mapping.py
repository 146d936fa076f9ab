"""`run_task`: a registered task over the rows of a DataFrame, with the worker's own retry rules.

On the executors each partition has a private queue in memory and a real worker: handlers, timeouts,
retries and delays are those of production. With a `url` the rows are submitted to that queue
instead, and its workers run them. The results are joined to the rows.

    from tenure.pipeline import run_task
    vectors = run_task(corpus.select("id", "text"), embed, key="id")
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from tenure.core.errors import UsageError
from tenure.core.job import JobRecord, NewJob
from tenure.core.registry import machines, open_ledger, open_queue
from tenure.pipeline.enqueue import content_of, enqueue, job_id_of, jobs_by_id, run_name
from tenure.worker import Settings, Task, Worker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RESULT_DDL = "job_id string, state string, result string, error string, attempts int"
_RESULTS = pa.schema(
    [
        pa.field("job_id", pa.string()),
        pa.field("state", pa.string()),
        pa.field("result", pa.string()),
        pa.field("error", pa.string()),
        pa.field("attempts", pa.int32()),
    ]
)
_ROWS_AT_ONCE = 1_000
_POLL_S = 0.5


def run_task(
    rows: DataFrame,
    task: Task,
    *,
    key: str,
    url: str = "",
    run: str = "",
    concurrency: int = 50,
    timeout_s: float = 3_600.0,
) -> DataFrame:
    """Run the task for each row; adds `state`, `result` and `error` (JSON), and `attempts`.

    The handler gets the row as an object. `key` names the column that tells rows apart; rows with
    the same key are distinguished by their content. A handler must be importable on the executors.
    """
    if key not in rows.columns:
        raise UsageError(f"key: there is no column {key!r}; there are {', '.join(rows.columns)}")
    name = run or run_name("run_task", task.name, url or secrets.token_hex(8))
    known = _known(rows, name, key)
    jobs = jobs_by_id(known, task=task.name, job_id="job_id")
    results = _through(jobs, url, timeout_s) if url else _on_executors(jobs, task, concurrency)
    return known.join(results, "job_id", "left").drop("job_id")


def _known(rows: DataFrame, run: str, key: str) -> DataFrame:
    """With the id of each row's job: by its key, and its number among rows of the same key."""
    twins = Window.partitionBy(key).orderBy(F.md5(content_of(rows)))
    numbered = rows.withColumn("__nth", F.row_number().over(twins))
    first, others = job_id_of(run, [key]), job_id_of(run, [key, "__nth"])
    job_id = F.when(F.col("__nth") == 1, first).otherwise(others)
    return numbered.withColumn("job_id", job_id).drop("__nth")


def _on_executors(jobs: DataFrame, task: Task, concurrency: int) -> DataFrame:
    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                part = batch.slice(start, _ROWS_AT_ONCE).to_pylist()
                records = asyncio.run(_work(part, task, concurrency))
                yield pa.RecordBatch.from_pylist([_result(each) for each in records], _RESULTS)

    return jobs.select("job_id", "payload").mapInArrow(work, RESULT_DDL)


async def _work(rows: list[dict[str, Any]], task: Task, concurrency: int) -> list[JobRecord]:
    """Run the rows in a worker until all have ended."""
    url = f"memory://{secrets.token_hex(8)}"
    queue, ledger = open_queue(url), open_ledger(url)
    limit = task.retry.max_attempts if task.retry else 1
    await queue.submit(
        [
            NewJob(
                task=task.name,
                payload=row["payload"].encode(),
                job_id=row["job_id"],
                max_attempts=limit,
            )
            for row in rows
        ]
    )
    worker = Worker([task], queues=[url], settings=Settings(concurrency=concurrency))
    serving = asyncio.create_task(worker.serve())
    try:
        await _all_ended(ledger, len(rows))
    finally:
        worker.stop()
        await serving
    records = [await ledger.get(row["job_id"]) for row in rows]
    return [record for record in records if record is not None]


async def _all_ended(ledger: Any, count: int) -> None:
    final = machines()["memory"].final
    while True:
        states = (await ledger.counts()).states
        if sum(states.get(state, 0) for state in final) >= count:
            return
        await asyncio.sleep(0.01)


def _through(jobs: DataFrame, url: str, timeout_s: float) -> DataFrame:
    """Submit the rows to a queue, wait until all have ended, read the results."""
    wanted = jobs.select("job_id").cache()
    enqueue(jobs, url)
    deadline_s = time.monotonic() + timeout_s
    spark = jobs.sparkSession
    final = {state for machine in machines().values() for state in machine.final}
    while True:
        stored = spark.read.format("tenure").option("url", url).option("table", "jobs").load()
        mine = stored.join(wanted, "job_id", "left_semi")
        if mine.where(~F.col("state").isin(*final)).isEmpty():
            break
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not all jobs had ended after {timeout_s:g} s")
        time.sleep(_POLL_S)
    return mine.select(
        "job_id", "state", "result", "error", F.col("attempt").cast("int").alias("attempts")
    )


def _result(record: JobRecord) -> dict[str, Any]:
    return {
        "job_id": record.job_id,
        "state": record.state,
        "result": record.result.decode() or None,
        "error": record.error.decode() or None,
        "attempts": record.attempt,
    }
