"""The Spark sink of capture: gets ranges of journals and writes files of events.

Events do not pass through Spark. Spark plans the ranges and stores the offsets; each task reads its
range from the store and writes it to Parquet. That is as fast as a plain program on each core, and
as safe as Spark's checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from tenure.pipeline.lake.files import LakeFiles, gathered
from tenure.pipeline.lake.layout import DAY_MS, event_file, event_files
from tenure.pipeline.lake.progress import Progress, Written, read_progress, write_progress
from tenure.pipeline.schema import ARROW, position_number
from tenure.pipeline.source.offsets import JournalRange, epoch_name
from tenure.pipeline.source.opening import open_reader
from tenure.pipeline.source.range_reader import BEGINNING, Read

_ROWS_AT_ONCE = 50_000


@dataclass
class Done(WriterCommitMessage):
    """What one task reports."""

    written: bytes


class LakeSink(DataSource):
    """`writeStream.format("tenure-lake")` with `lake` and `reader`, fed with ranges."""

    @classmethod
    def name(cls) -> str:
        """The name for `format(...)`."""
        return "tenure-lake"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802
        """For a stream of ranges."""
        return LakeWriter(str(self.options["lake"]), str(self.options["reader"]))


class LakeWriter(DataSourceStreamArrowWriter):
    """Reads each range and writes its events, one file a day."""

    def __init__(self, lake: str, reader: str) -> None:
        self._lake = lake
        self._reader = reader

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Runs in a task."""
        lake = LakeFiles(self._lake)
        ranges = [
            msgspec.convert(row, JournalRange) for batch in iterator for row in batch.to_pylist()
        ]
        return Done(
            msgspec.json.encode([write_range(lake, journal_range) for journal_range in ranges])
        )

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        """Runs in the driver, once a batch and again if its end was not noted."""
        lake = LakeFiles(self._lake)
        by_journal: dict[tuple[str, int], list[Written]] = defaultdict(list)
        for message in messages:
            for each in msgspec.json.decode(message.written, type=list[Written]):
                by_journal[each.journal, each.epoch].append(each)
        for (journal, epoch), ranges in by_journal.items():
            if any(each.repeated for each in ranges):
                continue  # this batch was committed before, as a whole
            before = read_progress(lake, epoch_name(journal, epoch))
            now = (before or Progress(journal=journal, url="", epoch=epoch)).then(ranges)
            _remove_strays(lake, now)
            write_progress(lake, now)
            # A batch may be repeated until the next one begins: the store must not trim its events.
            tell_store(ranges[0].url, now.after or BEGINNING, self._reader)

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
        """Nothing: the files are named for their ranges, and will be replaced."""


def tell_store(url: str, upto: str, reader: str) -> None:
    """Tell the store that it may trim up to here; "" removes the reader."""
    range_reader = open_reader(url)
    try:
        range_reader.captured(upto, reader)
    finally:
        range_reader.close()


def write_range(lake: LakeFiles, journal_range: JournalRange) -> Written:
    """One range into files; a range that was committed before is not read again."""
    seen = Read()
    files: list[str] = []
    before = read_progress(lake, journal_range.name)
    if before is not None and position_number(journal_range.upto) <= position_number(before.upto):
        return _written(journal_range, seen, files, repeated=True)
    range_reader = open_reader(journal_range.url, journal_range.name)
    try:
        with ExitStack() as stack:
            open_files: dict[str, pq.ParquetWriter] = {}
            for batch in gathered(
                range_reader.read(journal_range.after, journal_range.upto, seen), _ROWS_AT_ONCE
            ):
                for day, rows in _by_day(batch):
                    if day not in open_files:
                        file = event_file(
                            day, journal_range.name, journal_range.after, journal_range.upto
                        )
                        files.append(file.path)
                        open_files[day] = stack.enter_context(lake.writer(file.path, ARROW))
                    open_files[day].write_batch(rows)
    finally:
        range_reader.close()
    return _written(journal_range, seen, files)


def _written(
    journal_range: JournalRange, seen: Read, files: list[str], *, repeated: bool = False
) -> Written:
    return Written(
        journal=journal_range.journal,
        url=journal_range.url,
        epoch=journal_range.epoch,
        base=journal_range.base,
        after=journal_range.after,
        upto=journal_range.upto,
        units=seen.units,
        rows=seen.rows,
        files=files,
        repeated=repeated,
    )


def _by_day(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    day = batch.column("ts_ms").to_numpy() // DAY_MS
    for number in np.unique(day):
        rows = (
            batch if len(batch) and (day == number).all() else batch.filter(pa.array(day == number))
        )
        yield day_name(int(number)), rows


def day_name(number: int) -> str:
    """The day as a date.

    >>> day_name(20773)
    '2026-11-16'
    """
    return datetime.fromtimestamp(number * DAY_MS / 1000, UTC).strftime("%Y-%m-%d")


def _remove_strays(lake: LakeFiles, progress: Progress) -> None:
    """Remove files of the same ranges that an earlier try split differently."""
    name = epoch_name(progress.journal, progress.epoch)
    kept = {path for written in progress.ranges for path in written.files}
    begin = position_number(progress.after) if progress.after else 0
    for file in event_files(lake):
        is_ours = (
            file.journal == name
            and begin <= file.after
            and file.upto <= position_number(progress.upto)
        )
        if is_ours and file.path not in kept:
            lake.remove(file.path)
