"""The report: one page, complete in itself, and the commands that lead to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tenure.core.errors import NotFound
from tenure.pipeline.audit.lakes import audit_lake
from tenure.pipeline.capture import capture
from tenure.pipeline.report.figures import figures_of
from tenure.pipeline.report.page import page
from tenure.pipeline.tables.update import update_tables
from tests.spark.working import trim, work


async def test_the_page_shows_what_happened_and_needs_nothing_else(
    spark: SparkSession, lake: str, streams_url: str, bullmq_url: str
) -> None:
    urls = [streams_url, bullmq_url]
    for url in urls:
        await work(url, 60, fail_every=12)
    capture(spark, lake, urls, once=True)
    await work(streams_url, 3, prefix="lost")
    await trim(streams_url, keep=1)
    capture(spark, lake, urls, once=True)
    update_tables(spark, lake)
    audited = audit_lake(spark, lake)
    figures = figures_of(spark, lake)
    text = page(figures)
    assert audited.violations == 0, audited
    assert figures.jobs == 123 or figures.jobs == 120
    assert sum(row["count"] for row in figures.causes) == 10
    assert {row["error_code"] for row in figures.causes} == {"503"}
    assert "entries were trimmed between" in text
    assert not re.search(r"(?:src|href)=|https?://|@import|<script", text)
    for word in (
        "Throughput",
        "How long jobs took",
        "Failures by cause",
        "Audit",
        "sound",
        "worker-1",
    ):
        assert word in text


def test_a_report_before_the_tables_says_what_is_missing(
    spark: SparkSession, tmp_path: Path
) -> None:
    with pytest.raises(NotFound, match="is no lake"):
        figures_of(spark, str(tmp_path))
