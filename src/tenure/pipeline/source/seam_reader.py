"""Reads journals whose contract declares no `JournalFormat`, through the seam; slower.

The end of such a journal is found by reading it, so bounded batches read it twice. It is not split
for parallel readers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pyarrow as pa

from tenure.core.registry import open_journal
from tenure.pipeline.schema import position_number, rows_of
from tenure.pipeline.source.range_reader import (
    Head,
    Loss,
    Range,
    Read,
    gone_by_count,
    lost_by_count,
)

_PAGE = 1_000


class SeamRangeReader:
    """Any journal that the seam can open."""

    def __init__(self, url: str, journal: str) -> None:
        self._name = journal
        self._runner = asyncio.Runner()
        self._journal = open_journal(url)

    def head(self) -> Head:
        """The first and the last event; the store's own count is not known."""
        first = last = ""
        for batch in self._pages("", None):
            seq = batch.column("seq")
            first = first or seq[0].as_py()
            last = seq[-1].as_py()
        return Head(first=first, last=last)

    def bound(self, after: str, units_max: int, head: Head) -> str:
        """By reading on from `after`."""
        rows = 0
        for batch in self._pages(after, head.last):
            rows += batch.num_rows
            if rows >= units_max:
                return str(batch.column("seq")[-1].as_py())
        return head.last or after

    def gone(self, head: Head) -> int:
        """Unknown: the seam has no counts."""
        return gone_by_count(head)

    def lost(self, after: str, read: int, head: Head) -> Loss:
        """Unknown: the seam has no counts."""
        return lost_by_count(after, read, head)

    def split(self, after: str, upto: str, parts: int) -> list[Range]:
        """One range: positions do not tell how many events are between them."""
        return [(after, upto)]

    def read(self, after: str, upto: str, seen: Read) -> Iterator[pa.RecordBatch]:
        """Page by page."""
        for batch in self._pages(after, upto):
            seen.units += batch.num_rows
            seen.rows += batch.num_rows
            yield batch

    def captured(self, upto: str, reader: str) -> None:
        """Nothing: the seam has no call for it."""

    def close(self) -> None:
        """Close the journal."""
        self._runner.run(self._journal.close())
        self._runner.close()

    def _pages(self, after: str, upto: str | None) -> Iterator[pa.RecordBatch]:
        limit = position_number(upto) if upto else None
        while events := self._runner.run(self._journal.read(after=after, limit=_PAGE)):
            wanted = [e for e in events if limit is None or position_number(e.seq) <= limit]
            if wanted:
                yield rows_of(wanted, self._name)
            if len(wanted) < len(events):
                return
            after = events[-1].seq
