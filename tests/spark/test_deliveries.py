"""The audit of an outbox: events of a job that are delivered in another order are found."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.sql import SparkSession

from tenure.core.job import NewJob
from tenure.core.registry import open_queue
from tenure.pipeline.audit.explain import outbox_events
from tenure.pipeline.audit.lakes import audit_lake, violations
from tenure.pipeline.audit.run import Audit, Audited, History
from tenure.pipeline.capture import capture
from tenure.pipeline.lake import Lake
from tenure.pipeline.schema import ARROW
from tenure.pipeline.source.offsets import journal_name
from tenure.store.embedded import EmbeddedPostgres
from tests.contract.inbox_stage import migrated
from tests.spark.working import as_rows, drain, journal_of, lake_rows, retry_all, without_place

JOBS = 8
_unique = itertools.count(1)
Rows = list[dict[str, Any]]


async def work_and_tell(url: str, prefix: str) -> None:
    """Jobs with a receiver, run to their end; then all of their events are delivered."""
    hook = {"status_webhook_url": "https://hooks.test/"}
    queue, outbox = open_queue(url), open_queue(f"{url}&box=outbox")
    try:
        await queue.submit(
            [
                NewJob(task="t", payload=b"{}", job_id=f"{prefix}-{n}", options=hook)
                for n in range(JOBS)
            ]
        )
        await drain(queue)
        await drain(outbox)
    finally:
        await queue.close()
        await outbox.close()


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"inbox+sqlite:///{tmp_path}/inbox.db?queue=mail"


@pytest.fixture(params=["sqlite", "postgres"])
async def url(request: pytest.FixtureRequest, file_url: str) -> str:
    if request.param == "sqlite":
        return file_url
    postgres: EmbeddedPostgres = request.getfixturevalue("postgres")
    schema = f"told_{os.getpid()}_{next(_unique)}"
    await migrated(postgres.url, schema)
    return f"inbox+{postgres.url}?schema={schema}"


def verdict(audited: Audited) -> tuple[str, int]:
    told = next(each for each in audited.verdicts if each.invariant == "I28")
    return told.mark, told.violations


def found(spark: SparkSession, rows: Rows) -> tuple[set[str], set[str]]:
    """Which promises these rows break, and which events are named for the last of them."""
    events = spark.createDataFrame(pa.Table.from_pylist(rows, ARROW))
    history = History(new=events, all=lambda: events, outbox=outbox_events(events), quiesced=True)
    audit = Audit(spark, history)
    try:
        rows_found = audit.violations.collect()
        named = {row.job_id for row in rows_found if row.invariant == "I28"}
        return {row.invariant for row in rows_found}, named
    finally:
        audit.close()


def renamed(rows: Rows, one: str, other: str) -> Rows:
    """The history in which two events had each other's names."""
    names = {one: other, other: one}
    return [{**row, "job_id": names.get(row["job_id"], row["job_id"])} for row in rows]


async def test_a_receiver_that_goes_back_is_found_and_one_that_does_not_is_not(
    spark: SparkSession, url: str, lake: str
) -> None:
    await work_and_tell(url, "a")
    capture(spark, lake, [url], once=True)
    assert verdict(audit_lake(spark, lake)) == ("not seen", 0), "the outbox is not in the lake"
    capture(spark, lake, [url, f"{url}&box=outbox"], once=True)
    assert verdict(audit_lake(spark, lake)) == ("sound", 0)
    rows = lake_rows(lake)
    for each in (url, f"{url}&box=outbox"):
        mine = [row for row in rows if row["journal"] == journal_name(each)]
        assert without_place(mine) == as_rows(await journal_of(each))
    assert found(spark, rows) == (set(), set())
    rng = Random(28)
    jobs = rng.sample(range(JOBS), 3)
    broken = rows
    for job in jobs:  # the last event of each was delivered first
        broken = renamed(broken, f"a-{job}.1", f"a-{job}.2")
    assert found(spark, broken) == ({"I28"}, {f"a-{job}.1" for job in jobs})


async def test_what_was_found_is_counted_once_by_the_audits_that_follow(
    spark: SparkSession, file_url: str, lake: str
) -> None:
    both = [file_url, f"{file_url}&box=outbox"]
    await work_and_tell(file_url, "a")
    capture(spark, lake, both, once=True)
    _swap_in_files(lake, "a-3.1", "a-3.2")
    assert verdict(audit_lake(spark, lake)) == ("BROKEN", 1)
    await work_and_tell(file_url, "b")
    capture(spark, lake, both, once=True)
    assert verdict(audit_lake(spark, lake)) == ("BROKEN", 1)
    told = violations(spark, Lake(lake))
    assert told is not None
    assert [(row.job_id, row.text) for row in told.collect()] == [
        ("a-3.1", "delivered after event 2 of the same job")
    ]


async def test_an_event_that_was_sent_again_by_hand_is_not_held_against_its_receiver(
    spark: SparkSession, file_url: str, lake: str
) -> None:
    outbox = f"{file_url}&box=outbox"
    await work_and_tell(file_url, "a")
    assert await retry_all(outbox, ["a-1.1"]) == ["ok"]
    queue = open_queue(outbox)
    try:
        await drain(queue)
    finally:
        await queue.close()
    capture(spark, lake, [outbox], once=True)
    ends = [r["type"] for r in lake_rows(lake) if r["job_id"] == "a-1.1"]
    assert ends.count("complete") == 2
    assert verdict(audit_lake(spark, lake)) == ("sound", 0)


def _swap_in_files(lake: str, one: str, other: str) -> None:
    """The lake as if two events had each other's names."""
    table = Lake(lake).events.opened()
    assert table is not None
    rows = renamed(table.to_pyarrow_table().to_pylist(), one, other)
    write_deltalake(table, pa.Table.from_pylist(rows, ARROW), mode="overwrite")
