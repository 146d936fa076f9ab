"""A lake in a bucket: everything works without a jar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tenure.core.errors import UsageError
from tenure.pipeline.audit.lakes import audit_lake
from tenure.pipeline.capture import capture
from tenure.pipeline.lake import Lake
from tenure.pipeline.report.figures import figures_of
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


async def test_a_bucket_is_captured_counted_audited_and_reported_without_a_jar(
    spark: SparkSession, bucket: str, streams_url: str
) -> None:
    for round_ in range(2):
        await work(streams_url, 10, prefix=f"r{round_}-", fail_every=4)
        capture(spark, bucket, [streams_url], once=True)
        events = await journal_of(streams_url)
        assert without_place(lake_rows(bucket)) == as_rows(events)
        assert update_tables(spark, bucket).is_new
        audited = audit_lake(spark, bucket)
        assert (audited.jobs, audited.violations) == (10 * (round_ + 1), 0)
    assert capture(spark, bucket, [streams_url], once=True).events == 0
    figures = figures_of(spark, bucket)
    assert (figures.jobs, figures.events) == (20, len(events))
    assert KEY[1] not in Lake(bucket).name


def test_a_place_that_nobody_knows_is_refused_in_one_line(spark: SparkSession) -> None:
    with pytest.raises(UsageError, match="no place for a lake") as told:
        capture(spark, "ftp://host/lake", ["streams+redis://127.0.0.1:1/0"], once=True)
    assert "\n" not in str(told.value)
