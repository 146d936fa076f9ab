"""Capture: follows journals into the lake, exactly once, across any crash.

One streaming query reads all journals. Its checkpoint is stored in the lake, so that the two cannot
be separated. If Spark cannot write there (a bucket), the checkpoint is temporary: the lake itself
records how far it has come. A gap is recorded in the lake when it is found, and reported.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from tenure.core.errors import UsageError
from tenure.pipeline.lake.compact import compact
from tenure.pipeline.lake.delta import keep_log, publish
from tenure.pipeline.lake.feed import RangeFeed
from tenure.pipeline.lake.files import LakeFiles
from tenure.pipeline.lake.layout import event_files
from tenure.pipeline.lake.progress import CHECKPOINT, Progress, all_progress, committed, gaps
from tenure.pipeline.lake.reach import is_reached
from tenure.pipeline.lake.reader import known_reader, reader_of
from tenure.pipeline.lake.sink import LakeSink, tell_store
from tenure.pipeline.source.offsets import Gap
from tenure.pipeline.source.opening import journal_name
from tenure.pipeline.source.range_reader import BEGINNING
from tenure.pipeline.spark_errors import one_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

MAX_ROWS = 1_000_000
EVERY_S = 5.0
_LOOK_S = 0.25
_COMPACT_EVERY_S = 60.0


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """What a capture did: events new in the lake, how many it holds, and new gaps."""

    events: int
    total: int
    gaps: list[Gap]


def capture(
    spark: SparkSession,
    lake: str,
    urls: Sequence[str],
    *,
    once: bool = False,
    every_s: float = EVERY_S,
    max_rows: int = MAX_ROWS,
    parts: int = 0,
    table_format: str = "",
    tell: Callable[[str], None] = lambda _text: None,
    until: Callable[[], bool] = lambda: False,
) -> Captured:
    """Follow journals; with `once` up to what exists now, else until `until` returns True.

    `tell` is called with every gap and with the progress. `table_format` "delta" keeps a Delta log
    beside the files from then on.
    """
    files = LakeFiles(lake)
    files.begin()
    _check(files, urls)
    spark.dataSource.register(RangeFeed)
    spark.dataSource.register(LakeSink)
    before = sum(each.rows for each in all_progress(files))
    known = {str(gap) for gap in gaps(files)}
    reader = reader_of(files)
    tidy = _tidying(files, table_format)
    _clear(files, urls)
    tidy()
    # From here on the stores do not trim what this lake lacks; a batch may have to be repeated.
    _tell(files, urls, reader, lambda progress: progress.after)
    with _checkpoint(spark, files) as checkpoint:
        query = _start(
            spark, files, reader, urls, checkpoint, once, every_s, max_rows, parts or _cores(spark)
        )
        try:
            _watch(query, files, known, tell, until, tidy)
        finally:
            if query.isActive:
                query.stop()
    if once:  # no batch will be repeated: everything may be trimmed
        _tell(files, urls, reader, lambda progress: progress.upto)
    tidy()
    total = sum(each.rows for each in all_progress(files))
    new = [gap for gap in gaps(files) if str(gap) not in known]
    return Captured(events=total - before, total=total, gaps=new)


def release(urls: Sequence[str], lake: str, reader: str = "") -> None:
    """Stop capturing these queues into this lake: their stores may trim without regard to it.

    `reader` is the name under which a store knows a lake that is gone.
    """
    name = reader or known_reader(LakeFiles(lake))
    for url in urls:
        tell_store(url, "", name or lake)


def _tell(
    files: LakeFiles, urls: Sequence[str], reader: str, kept: Callable[[Progress], str]
) -> None:
    """Tell each store up to which position its journal is in the lake."""
    newest: dict[str, Progress] = {}
    for each in sorted(all_progress(files), key=lambda each: each.epoch):
        newest[each.journal] = each
    for url in urls:
        progress = newest.get(journal_name(url))
        tell_store(url, (progress and kept(progress)) or BEGINNING, reader)


def _tidying(files: LakeFiles, table_format: str) -> Callable[[], None]:
    """The function that compacts files and updates the Delta log, if there is one."""
    if not keep_log(files, table_format):
        return lambda: _compacted(files)

    def tidy() -> None:
        # Small files are removed after the log names the large one.
        compact(files, before_removing=lambda: publish(files))
        publish(files)

    return tidy


def _compacted(files: LakeFiles) -> None:
    compact(files)


def _clear(files: LakeFiles, urls: Sequence[str]) -> None:
    """Remove files that a killed capture wrote and did not commit; their events are read again.

    With Spark's checkpoint this is not needed: the same ranges are read again, and their files
    replace these.
    """
    if files.names(f"{CHECKPOINT}/offsets"):
        return
    ours = {journal_name(url) for url in urls}
    upto = committed(files)
    for file in event_files(files):
        if file.journal.partition(".")[0] in ours and file.upto > upto.get(file.journal, 0):
            files.remove(file.path)


@contextmanager
def _checkpoint(spark: SparkSession, files: LakeFiles) -> Iterator[str]:
    """Where Spark keeps how far it has come."""
    if is_reached(spark, files):
        yield files.uri(CHECKPOINT)
        return
    with tempfile.TemporaryDirectory(prefix="tenure-checkpoint-") as folder:
        yield f"file://{folder}"


def _start(
    spark: SparkSession,
    files: LakeFiles,
    reader: str,
    urls: Sequence[str],
    checkpoint: str,
    once: bool,
    every_s: float,
    max_rows: int,
    parts: int,
) -> StreamingQuery:
    ranges = (
        spark.readStream.format("tenure-ranges")
        .option("lake", files.address)
        .option("urls", "\n".join(urls))
        .option("parts", str(parts))
        .option("max_rows", str(max_rows))
        .load()
    )
    writer = (
        ranges.writeStream.format("tenure-lake")
        .option("lake", files.address)
        .option("reader", reader)
        .option("checkpointLocation", checkpoint)
        .outputMode("append")
        .queryName("tenure-capture")
    )
    if once:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{every_s} seconds").start()


def _watch(
    query: StreamingQuery,
    files: LakeFiles,
    known: set[str],
    tell: Callable[[str], None],
    until: Callable[[], bool],
    tidy: Callable[[], None],
) -> None:
    seen = set(known)
    compacted_s = time.monotonic()
    ended = False
    while not ended and not until():
        with one_line():
            ended = bool(query.awaitTermination(_LOOK_S))  # type: ignore[arg-type]
        for gap in gaps(files):
            if str(gap) not in seen:
                seen.add(str(gap))
                tell(f"gap: {gap}")
        if time.monotonic() - compacted_s > _COMPACT_EVERY_S:
            tidy()
            compacted_s = time.monotonic()


def _check(files: LakeFiles, urls: Sequence[str]) -> None:
    if not urls:
        raise UsageError("capture needs at least one queue URL")
    names = [journal_name(url) for url in urls]
    if len(set(names)) < len(names):
        raise UsageError("two of these URLs name the same journal; name each once")
    if not files.lake:
        raise UsageError("capture needs a lake: --lake PATH")


def _cores(spark: SparkSession) -> int:
    """How many tasks may run in parallel; works with Spark Connect too."""
    master = spark.conf.get("spark.master", "") or ""
    inside = master.partition("[")[2].rstrip("]").partition(",")[0]
    if inside.isdecimal():
        return int(inside)
    import os

    return os.cpu_count() or 2
