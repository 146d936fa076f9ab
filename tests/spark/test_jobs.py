"""Rows become jobs, dead jobs go back, tasks run over rows."""

from __future__ import annotations

from collections import Counter
from hashlib import md5
from pathlib import Path
from uuid import UUID

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tenure.core.errors import UsageError
from tenure.core.registry import open_ledger, open_queue
from tenure.core.seam import Query
from tenure.pipeline import run_task
from tenure.pipeline.capture import capture
from tenure.pipeline.enqueue import enqueue, jobs_of
from tenure.pipeline.lake import Lake
from tenure.pipeline.replay import chosen, counted, replay, sources
from tenure.pipeline.tables.update import update_tables
from tests.spark.handlers import shout
from tests.spark.working import drain, lake_rows, work


async def states(url: str) -> dict[str, int]:
    """How many of the jobs themselves are in which state."""
    ledger = open_ledger(url)
    try:
        page = await ledger.find(Query(limit=500))
        return dict(Counter(job.state for job in page.jobs))
    finally:
        await ledger.close()


async def test_rows_written_again_are_the_same_jobs(
    spark: SparkSession, streams_url: str, bullmq_url: str
) -> None:
    rows = spark.range(40).selectExpr("id as number", "concat('row ', id) as text")
    for url, waiting in ((streams_url, "queued"), (bullmq_url, "waiting")):
        for _ in range(2):
            (
                rows.write.format("tenure")
                .option("url", url)
                .option("task", "t")
                .option("key", "number")
                .mode("append")
                .save()
            )
        assert await states(url) == {waiting: 40}
    ledger = open_ledger(streams_url)
    page = await ledger.find(Query(limit=1))
    await ledger.close()
    assert page.jobs[0].payload.startswith(b'{"number":')


async def test_a_stream_of_rows_becomes_jobs_once(
    spark: SparkSession, streams_url: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text('{"job_id":"a","n":1}\n{"job_id":"b","n":2}\n')
    for _ in range(2):  # a lost checkpoint repeats everything
        query = (
            spark.readStream.schema("job_id string, n int")
            .json(str(tmp_path / "in"))
            .writeStream.format("tenure")
            .option("url", streams_url)
            .option("task", "t")
            .option("checkpointLocation", str(tmp_path / f"check{_}"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    assert await states(streams_url) == {"queued": 2}


def test_rows_that_cannot_be_told_apart_are_refused(spark: SparkSession) -> None:
    rows = spark.range(3)
    with pytest.raises(PySparkException, match="a row needs something by which it is known"):
        rows.write.format("tenure").option("url", "memory://x").option("task", "t").mode(
            "append"
        ).save()


async def test_enqueue_goes_on_where_it_was_stopped_and_equal_rows_are_as_many_jobs(
    spark: SparkSession, streams_url: str
) -> None:
    rows = spark.createDataFrame([("a", 1), ("a", 1), ("b", 2)], "text string, n int")
    jobs = jobs_of(rows, task="t", run="monday")
    first = enqueue(jobs.limit(2), streams_url, tasks=1)
    again = enqueue(jobs, streams_url, tasks=2)
    assert first.created == 2
    assert (again.created, again.replayed, again.refused) == (1, 2, 0)
    other = enqueue(jobs_of(rows, task="t", run="tuesday"), streams_url, tasks=2)
    assert other.created == 3
    with pytest.raises(UsageError, match="no column 'nope'; there are text, n"):
        jobs_of(rows, task="t", run="x", key=["nope"])


async def test_a_rows_id_follows_from_run_and_key_and_its_options_are_the_jobs(
    spark: SparkSession, bullmq_url: str
) -> None:
    rows = spark.createDataFrame([("a", 7), ("b", None)], "text string, priority int")
    enqueue(jobs_of(rows, task="t", run="monday", key=["text"]), bullmq_url, tasks=1)
    ledger = open_ledger(bullmq_url)
    page = await ledger.find(Query(limit=10))
    await ledger.close()
    ids = [
        str(UUID(md5(f'monday\n{{"text":"{text}"}}'.encode(), usedforsecurity=False).hexdigest()))
        for text in "ab"
    ]
    assert {(job.job_id, job.priority, job.payload) for job in page.jobs} == {
        (ids[0], 7, b'{"text":"a"}'),
        (ids[1], 0, b'{"text":"b"}'),
    }


async def test_dead_jobs_go_back_once_to_their_queue_or_another(
    spark: SparkSession, lake: str, streams_url: str, bullmq_url: str
) -> None:
    await work(streams_url, 30, fail_every=10)
    capture(spark, lake, [streams_url], once=True)
    files = Lake(lake)
    update_tables(spark, lake)
    dead = chosen(spark, files, "error_code = '503' and task = 'task1'")
    (row,) = counted(dead)
    assert (row["count"], row["state"], row["contract"]) == (1, "error", "streams")
    stores = sources(files, [])
    elsewhere = replay(dead, stores, to=bullmq_url)
    assert (elsewhere.again, elsewhere.changed) == (1, 0)
    assert replay(dead, stores, to=bullmq_url).changed == 1
    assert replay(dead, stores).again == 1
    assert replay(dead, stores).changed == 1, "it waits again: nothing to send back"
    queue = open_queue(streams_url, worker_id="w")
    await drain(queue)
    await queue.close()
    assert await states(streams_url) == {"done": 28, "error": 2}
    capture(spark, lake, [streams_url], once=True)
    assert sum(each["type"] == "reopen" for each in lake_rows(lake)) == 1


def test_rows_with_the_same_key_have_each_its_own_result(spark: SparkSession) -> None:
    rows = spark.createDataFrame([(n % 2, f"text {n}") for n in range(4)], "id int, text string")
    done = run_task(rows, shout, key="id").collect()
    assert sorted((row.text, row.result) for row in done) == [
        (f"text {n}", f'"TEXT {n}"') for n in range(4)
    ]


def test_a_task_runs_over_rows_with_the_workers_retries(spark: SparkSession) -> None:
    rows = spark.createDataFrame([(n, f"text {n}") for n in range(12)], "id int, text string")
    done = {row.id: row for row in run_task(rows, shout, key="id").collect()}
    assert len(done) == 12
    assert done[1].result == '"TEXT 1"'
    assert (done[1].state, done[1].attempts) == ("done", 1)
    assert (done[5].state, done[5].attempts) == ("done", 2), "the first try of 5 fails"
    assert (done[7].state, done[7].result) == ("failed", None)
    assert "seven" in done[7].error
