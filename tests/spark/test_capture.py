"""Capture: the lake equals the journals, whatever happens on the way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tenure.core.errors import StoreError, UsageError
from tenure.core.journal import StreamFormat
from tenure.core.registry import journal_format, journal_urls, open_queue
from tenure.pipeline import capture as capturing
from tenure.pipeline.capture import capture
from tenure.pipeline.lake import Lake
from tenure.pipeline.schema import ARROW, LINE_MAX, OFFSET
from tenure.pipeline.source.offsets import Mark, journal_name
from tenure.store.redis import BulkRedis
from tests.spark.working import as_rows, journal_of, lake_rows, trim, without_place, work


async def equal(lake: str, *urls: str) -> bool:
    """Whether the lake holds exactly what the journals hold, in their order."""
    found = lake_rows(lake)
    for url in urls:
        events = await journal_of(url)
        mine = [row for row in found if row["queue"] == events[0].queue]
        if without_place(mine) != as_rows(events):
            return False
    return len(found) == sum([len(await journal_of(url)) for url in urls])


async def test_two_contracts_are_captured_event_for_event_and_nothing_twice(
    spark: SparkSession, lake: str, streams_url: str, bullmq_url: str
) -> None:
    urls = [streams_url, bullmq_url]
    for round_ in range(2):
        for url in urls:
            await work(url, 50, prefix=f"r{round_}-", fail_every=9)
        done = capture(spark, lake, urls, once=True)
        assert done.events > 250
        assert await equal(lake, *urls)
    assert capture(spark, lake, urls, once=True).events == 0


@pytest.mark.clause("S-55")
async def test_a_queue_with_shards_is_captured_as_one_queue(
    spark: SparkSession, lake: str, streams_url: str
) -> None:
    """Each shard is a journal of its own, read in bulk, trimmed behind what was captured of it."""
    url = f"{streams_url}&shards=3"
    await work(url, 50, fail_every=9)
    capture(spark, lake, [url], once=True)
    rows = lake_rows(lake)
    for shard in journal_urls(url):
        mine = [row for row in rows if row["journal"] == journal_name(shard)]
        assert mine
        assert without_place(mine) == as_rows(await journal_of(shard))
    assert len(rows) == len(await journal_of(url))
    assert {row["queue"] for row in rows} == {"jobs:stream"}
    assert capture(spark, lake, [url], once=True).events == 0
    jobs = spark.read.format("tenure").option("url", url).option("table", "jobs").load()
    assert sorted(row.job_id for row in jobs.select("job_id").collect()) == sorted(
        f"j{number}" for number in range(50)
    )


async def test_bounded_batches_capture_the_same(
    spark: SparkSession, lake: str, streams_url: str
) -> None:
    for n in range(6):
        await work(streams_url, 20, prefix=f"b{n}-")
    capture(spark, lake, [streams_url], once=True, max_rows=4)
    table = Lake(lake).events.opened()
    assert table is not None
    assert table.version() > 3
    assert await equal(lake, streams_url)


async def test_a_batch_that_is_repeated_after_a_crash_changes_nothing(
    spark: SparkSession, lake: str, streams_url: str
) -> None:
    """Killed after the commit: the next capture begins after it, even if it is trimmed."""
    await work(streams_url, 40)
    capture(spark, lake, [streams_url], once=True)
    before = lake_rows(lake)
    events = Lake(lake).events
    again = pa.Table.from_pylist([*before, *offset_rows(before)], ARROW)
    events.put_events(again.to_batches())
    assert lake_rows(lake) == before, "written twice"
    await trim(streams_url, keep=0)
    done = capture(spark, lake, [streams_url], once=True)
    assert (done.events, done.gaps) == (0, [])


def offset_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What says that these rows are the first of their journal."""
    upto = max(row["pos"] for row in rows)
    # Of a stream entry: its end, not its last line.
    told = {"after": 0, "upto": upto | LINE_MAX, "units": 1}
    data = msgspec.json.encode(told).decode()
    return [{**rows[-1], "type": OFFSET, "contract": "", "ver": 0, "data": data}]


async def test_files_that_were_written_and_not_committed_do_not_count(
    spark: SparkSession, lake: str, streams_url: str
) -> None:
    """Killed between the files and their commit."""
    await work(streams_url, 10)
    capture(spark, lake, [streams_url], once=True)
    file, *_ = (Path(lake) / "events").glob("journal=*/*.parquet")
    shutil.copy(file, file.with_name("part-left.parquet"))
    await work(streams_url, 5, prefix="later")
    assert capture(spark, lake, [streams_url], once=True).events == 15
    assert await equal(lake, streams_url)
    assert any("part-left" in path for path in Lake(lake).events.vacuum(0))
    assert await equal(lake, streams_url)


async def test_a_capture_that_another_one_overtook_goes_on_after_it(
    spark: SparkSession, lake: str, streams_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two captures of one journal into one lake: the batch that comes second is not written."""
    await work(streams_url, 20)
    capture(spark, lake, [streams_url], once=True)
    await work(streams_url, 20, prefix="more")
    told: list[str] = []
    now = capturing.starting_marks

    def looked(place: Lake, urls: list[str]) -> dict[str, Mark]:
        """Before the other one wrote, until it is told of that."""
        return now(place, urls) if told else {}

    monkeypatch.setattr(capturing, "starting_marks", looked)
    monkeypatch.setattr(capturing, "_WAIT_S", 0)
    done = capture(spark, lake, [streams_url], once=True, tell=told.append)
    assert (done.events, done.gaps) == (60, [])
    assert told == ["another capture writes the same journals into this lake; this one waits"]
    assert await equal(lake, streams_url)


async def test_what_was_trimmed_before_it_was_read_is_named_and_counted(
    spark: SparkSession, lake: str, streams_url: str
) -> None:
    told: list[str] = []
    await work(streams_url, 10)
    capture(spark, lake, [streams_url], once=True)
    for n in range(5):
        await work(streams_url, 1, prefix=f"k{n}")
    await trim(streams_url, keep=4)
    done = capture(spark, lake, [streams_url], once=True, tell=told.append)
    (gap,) = done.gaps
    assert (gap.reason, gap.lost) == ("trimmed", 5 * 3 - 4)
    assert len(told) == 1
    assert "11 entries were trimmed between" in told[0]
    await work(streams_url, 2, prefix="later")
    assert capture(spark, lake, [streams_url], once=True).gaps == []
    assert len(Lake(lake).gaps()) == 1


async def test_a_store_that_was_emptied_is_named_and_its_new_journal_is_captured(
    spark: SparkSession, lake: str, streams_url: str
) -> None:
    await work(streams_url, 10)
    capture(spark, lake, [streams_url], once=True)
    fmt = journal_format(streams_url)
    assert isinstance(fmt, StreamFormat)
    with BulkRedis(fmt.store) as redis:
        redis.call("DEL", fmt.key)
    await work(streams_url, 4, prefix="anew")
    done = capture(spark, lake, [streams_url], once=True)
    assert [gap.reason for gap in done.gaps] == ["restarted"]
    assert done.events == 12
    assert sum(str(row["journal"]).endswith(".1") for row in lake_rows(lake)) == 12


@pytest.mark.clause("S-30")
async def test_a_captured_journal_is_trimmed_only_behind_what_was_captured(
    spark: SparkSession, lake: str, streams_url: str
) -> None:
    short = f"{streams_url}&journal_bytes=1"
    await work(streams_url, 10)
    capture(spark, lake, [streams_url], once=True)
    for n in range(60):
        await work(streams_url, 1, prefix=f"k{n}-")
    queue = open_queue(short, worker_id="w")
    try:
        await queue.upkeep()
        left = {event.job_id for event in await journal_of(streams_url)}
        assert left >= {f"k{n}-0" for n in range(60)}, "what was not captured was trimmed"
        capture(spark, lake, [streams_url], once=True)
        fmt = journal_format(streams_url)
        assert isinstance(fmt, StreamFormat)
        with BulkRedis(fmt.store) as redis:
            redis.call("HDEL", fmt.captured[0], "tidy_at")  # it tidies every ten seconds
        await queue.upkeep()
        assert len(await journal_of(streams_url)) < 180
    finally:
        await queue.close()
    assert len(lake_rows(lake)) == 210
    assert capture(spark, lake, [streams_url], once=True).gaps == []


async def test_small_files_become_one_and_nothing_is_lost_or_doubled(
    spark: SparkSession, lake: str, streams_url: str
) -> None:
    for n in range(3):
        await work(streams_url, 5, prefix=f"c{n}-")
        capture(spark, lake, [streams_url], once=True, parts=1)
    events = Lake(lake).events
    reader = events.read(spark)  # of the version before
    events.optimize()
    table = events.opened()
    assert table is not None
    assert len(table.file_uris()) == 1
    assert await equal(lake, streams_url)
    assert reader.count() == 45, "a reader of small files still has them"
    await work(streams_url, 5, prefix="after")
    assert capture(spark, lake, [streams_url], once=True).events == 15
    assert await equal(lake, streams_url)


def test_a_folder_with_other_files_is_not_made_a_lake(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "thesis.doc").write_text("mine")
    with pytest.raises(UsageError, match="holds other files"):
        capture(spark, str(tmp_path), ["streams+redis://127.0.0.1:1/0"], once=True)


def test_a_store_that_is_away_is_told_in_one_line(spark: SparkSession, lake: str) -> None:
    with pytest.raises(StoreError, match=r"redis://127\.0\.0\.1:1/0: cannot connect") as told:
        capture(spark, lake, ["streams+redis://127.0.0.1:1/0"], once=True)
    assert "\n" not in str(told.value)
