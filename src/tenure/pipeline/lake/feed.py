"""The Spark source of capture: the ranges of journals to capture next, as rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from tenure.pipeline.lake.files import LakeFiles
from tenure.pipeline.lake.progress import all_progress, mark_of, note_gap, units_read
from tenure.pipeline.source.journal import RangePartition
from tenure.pipeline.source.offsets import Follower, Gap, JournalRange, Mark, Offset

RANGE_DDL = "journal string, url string, after string, upto string, epoch int, base bigint"
_FIELDS = tuple(field.name for field in msgspec.structs.fields(JournalRange))


class RangeFeed(DataSource):
    """`readStream.format("tenure-ranges")` with `lake`, `urls`, `parts` and `max_rows`."""

    @classmethod
    def name(cls) -> str:
        """The name for `format(...)`."""
        return "tenure-ranges"

    def schema(self) -> str:
        """The fields of `JournalRange`."""
        return RANGE_DDL

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802
        """For a stream."""
        return RangeStream(dict(self.options))


class RangeStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans ranges in the driver; a task only hands its range on."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options
        self._lake = options["lake"]
        self._urls = options["urls"].splitlines()
        self._parts = int(options["parts"])
        self._follower: Follower | None = None

    def initialOffset(self) -> Offset:  # noqa: N802
        """After what the lake holds: so a lost checkpoint does no harm."""
        return self._follow().begin()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """As far as the limit allows, in entries."""
        rows = 0 if isinstance(limit, ReadAllAvailable) else getattr(limit, "max_rows", 0)
        return self._follow().latest(
            start, max(1, round(rows / self._rows_per_unit())) if rows else 0
        )

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """By the option `max_rows`."""
        return ReadMaxRows(int(self._options["max_rows"]))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Go no further than what there is now."""
        self._follow().aim()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """One for each range."""
        return [
            RangePartition(journal_range)
            for journal_range in self._follow().ranges(start, end, self._parts)
        ]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Runs in a task: one row."""
        journal_range = cast("RangePartition", partition).journal_range
        yield tuple(getattr(journal_range, name) for name in _FIELDS)

    def stop(self) -> None:
        """Close connections."""
        if self._follower is not None:
            self._follower.close()

    def _follow(self) -> Follower:
        if self._follower is None:
            lake = LakeFiles(self._lake)

            def on_gap(gap: Gap) -> None:
                note_gap(lake, gap)

            def read_so_far(journal: str, mark: Mark) -> int:
                return units_read(lake, journal, mark)

            def known(journal: str) -> Mark | None:
                return mark_of(lake, journal)

            self._follower = Follower(
                self._urls, on_gap=on_gap, read_so_far=read_so_far, known=known
            )
        return self._follower

    def _rows_per_unit(self) -> float:
        """How many events an entry has held so far."""
        known = all_progress(LakeFiles(self._lake))
        units, rows = sum(each.units for each in known), sum(each.rows for each in known)
        return max(1.0, rows / units) if units else 1.0
