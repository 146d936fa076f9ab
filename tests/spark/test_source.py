"""Queue URLs as a Spark data source: what Spark reads is what the seam reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from tenure.core.registry import open_ledger
from tenure.core.seam import Query
from tests.spark.working import as_rows, journal_of, trim, without_place, work


@pytest.mark.parametrize("contract", ["streams", "bullmq"])
async def test_the_journal_in_spark_is_the_journal_of_the_seam(
    spark: SparkSession, contract: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(f"{contract}_url")
    await work(url, 120, fail_every=10)
    rows = spark.read.format("tenure").option("url", url).option("parts", 3).load()
    found = [row.asDict() for row in rows.orderBy("pos").collect()]
    assert without_place(found) == as_rows(await journal_of(url))
    assert rows.rdd.getNumPartitions() > 1


async def test_spark_finds_the_source_without_being_told(
    spark: SparkSession, streams_url: str
) -> None:
    await work(streams_url, 5)
    untouched = spark.newSession()
    assert untouched.read.format("tenure").option("url", streams_url).load().count() == 15


async def test_only_the_wanted_columns_and_times_are_read(
    spark: SparkSession, streams_url: str
) -> None:
    await work(streams_url, 30)
    events = await journal_of(streams_url)
    since_ms = events[60].ts_ms
    rows = (
        spark.read.format("tenure")
        .option("url", streams_url)
        .option("columns", "job_id, ts_ms")
        .option("pushdown", "true")
        .load()
        .where(F.col("ts_ms") >= since_ms)
    )
    assert rows.columns == ["job_id", "ts_ms"]
    assert rows.count() == sum(event.ts_ms >= since_ms for event in events)


async def test_the_jobs_of_a_store_are_rows(spark: SparkSession, streams_url: str) -> None:
    await work(streams_url, 40, fail_every=8)
    rows = spark.read.format("tenure").option("url", streams_url).option("table", "jobs").load()
    found = {row.job_id: (row.state, row.payload, row.attempt) for row in rows.collect()}
    ledger = open_ledger(streams_url)
    page = await ledger.find(Query(limit=100))
    await ledger.close()
    assert found == {j.job_id: (j.state, j.payload.decode(), j.attempt) for j in page.jobs}


async def test_a_stream_reads_everything_once_in_bounded_batches(
    spark: SparkSession, streams_url: str, tmp_path: Path
) -> None:
    await work(streams_url, 60)
    expected = as_rows(await journal_of(streams_url))

    def follow() -> list[int]:
        query = (
            spark.readStream.format("tenure")
            .option("url", streams_url)
            .option("max_rows", 2)  # of its entries, which hold up to a hundred events
            .load()
            .writeStream.format("json")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        query.awaitTermination()
        return [progress["numInputRows"] for progress in query.recentProgress]

    assert len([rows for rows in follow() if rows]) > 1
    await work(streams_url, 60, prefix="k")
    follow()
    written = spark.read.json(str(tmp_path / "out")).orderBy("pos").collect()
    assert [row.seq for row in written][: len(expected)] == [row["seq"] for row in expected]
    assert len(written) == len(await journal_of(streams_url))


async def test_a_stream_that_lost_events_stops_and_says_how_many(
    spark: SparkSession, streams_url: str, tmp_path: Path
) -> None:
    def follow() -> None:
        query = (
            spark.readStream.format("tenure")
            .option("url", streams_url)
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    await work(streams_url, 5)
    follow()
    for n in range(4):
        await work(streams_url, 1, prefix=f"k{n}")
    await trim(streams_url, keep=2)
    with pytest.raises(StreamingQueryException, match="entries were trimmed between"):
        follow()


def test_a_source_without_a_queue_says_what_it_needs(spark: SparkSession) -> None:
    with pytest.raises(PySparkException, match="the data source needs a queue"):
        spark.read.format("tenure").load().count()


def test_an_unknown_column_is_refused_with_the_known_ones(spark: SparkSession) -> None:
    with pytest.raises(PySparkException, match="no column 'payload'; it has journal, pos, seq"):
        spark.read.format("tenure").option("url", "memory://x").option("columns", "payload").load()


def test_offsets_are_plain_json() -> None:
    from tenure.pipeline.source.offsets import Mark, read_offset, write_offset

    marks = {"a": Mark(upto="5-1", added=7, epoch=1)}
    assert read_offset(json.loads(json.dumps(write_offset(marks)))) == marks
