"""A lake in a bucket: captured without any jar; read by Spark where it has the connector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tenure.core.errors import UsageError
from tenure.pipeline.capture import capture
from tenure.pipeline.lake.files import LakeFiles
from tenure.pipeline.lake.layout import event_file, event_files
from tenure.pipeline.lake.progress import all_progress
from tenure.pipeline.lake.reach import hadoop_version, is_reached
from tenure.pipeline.schema import ARROW
from tenure.pipeline.tables.update import update_tables
from tests.contract.transcode.bucket import S3Server
from tests.spark.working import as_rows, journal_of, lake_rows, without_place, work

KEY = ("AKTENURE", "not-so-secret")


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[str]:
    """The address of a lake in an empty bucket of a server that checks signatures."""
    (tmp_path / "served" / "lakes").mkdir(parents=True)
    server = S3Server(tmp_path / "served")
    server.start(KEY)
    where = f"endpoint_override=127.0.0.1:{server.port}&scheme=http&region=us-east-1"
    yield f"s3://{':'.join(KEY)}@lakes/mine?{where}"
    server.stop()


async def test_a_bucket_is_captured_into_without_a_jar_and_events_are_there_once(
    spark: SparkSession, bucket: str, streams_url: str
) -> None:
    for round_ in range(2):
        await work(streams_url, 10, prefix=f"r{round_}-", fail_every=4)
        capture(spark, bucket, [streams_url], once=True)
        events = await journal_of(streams_url)
        assert without_place(lake_rows(bucket)) == as_rows(events)
    assert capture(spark, bucket, [streams_url], once=True).events == 0
    lake = LakeFiles(bucket)
    assert not is_reached(spark, lake)
    with pytest.raises(UsageError, match="Spark has no connector for S3 here") as told:
        update_tables(spark, bucket)
    assert f"org.apache.hadoop:hadoop-aws:{hadoop_version()}" in str(told.value)
    assert "\n" not in str(told.value)
    assert KEY[1] not in str(told.value)


async def test_what_was_written_and_not_committed_is_written_again(
    spark: SparkSession, lake: str, streams_url: str
) -> None:
    """Killed between files and commit, with its checkpoint lost as well."""
    await work(streams_url, 10)
    capture(spark, lake, [streams_url], once=True)
    files = LakeFiles(lake)
    (progress,) = all_progress(files)
    await work(streams_url, 5, prefix="later")
    (written, *_) = event_files(files)
    upto = (await journal_of(streams_url))[-1].seq.partition(".")[0]
    stray = event_file(written.day, progress.journal, progress.upto, upto)
    files.write_table(stray.path, files.read_table([written.path], ARROW))
    files.remove("_capture/checkpoint")
    assert capture(spark, lake, [streams_url], once=True).events == 15
    assert without_place(lake_rows(lake)) == as_rows(await journal_of(streams_url))


def test_a_place_that_nobody_knows_is_refused_in_one_line(spark: SparkSession) -> None:
    with pytest.raises(UsageError, match="no place for a lake") as told:
        capture(spark, "ftp://host/lake", ["streams+redis://127.0.0.1:1/0"], once=True)
    assert "\n" not in str(told.value)
