"""Reads a journal in bulk: where it begins and ends, and how to split it into ranges and read them.

A position is a string that only its reader understands; `schema.position_number` makes positions
comparable. A range is (after, upto]. All calls block. A reader belongs to one process: each Spark
task opens its own.

`SeamRangeReader` reads journals whose contract declares no `JournalFormat`, through the seam. It
is slower: the end of such a journal is found by reading it, so bounded batches read it twice, and
it is not split for parallel readers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Protocol

import msgspec
import pyarrow as pa

from tenure.core.registry import open_journal
from tenure.pipeline.schema import position_number, rows_of

Range = tuple[str, str]
BEGINNING = "0"
"""The position of a reader that has kept nothing yet."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal holds now. "" where it is empty; -1 where the store does not count.

    `added` counts the units (stream entries, rows) ever written, `length` those still there. New
    entries come after the position `end`; "" means after the last entry.
    """

    first: str = ""
    last: str = ""
    end: str = ""
    added: int = -1
    length: int = -1


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Units that were removed before they were read; -1: some, but their number is unknown.

    If it is not exact, it is an upper bound: some of the units may never have existed.
    """

    units: int = 0
    is_exact: bool = True


class Read(msgspec.Struct):
    """Counts what a read of a range has seen so far, in the units of `Head`."""

    units: int = 0
    rows: int = 0


class RangeReader(Protocol):
    """Reads one journal."""

    def head(self) -> Head:
        """What there is now."""

    def bound(self, after: str, rows_max: int, head: Head) -> str:
        """A position after `after` with about so many rows between, at most the head's last."""

    def gone(self, head: Head) -> int:
        """The most units that can have been removed before the first read; -1: unknown."""

    def lost(self, after: str, read: int, head: Head) -> Loss:
        """What was removed after `after` unread; `read` counts the units read (-1: unknown)."""

    def split(self, after: str, upto: str, parts: int) -> list[Range]:
        """The range split into at most `parts` ranges, for parallel readers."""

    def read(self, after: str, upto: str, seen: Read) -> Iterator[pa.RecordBatch]:
        """The events of a range; `seen` grows meanwhile."""

    def captured(self, upto: str, reader: str) -> None:
        """Tell the store that `reader` has everything up to here; "" removes that reader."""

    def close(self) -> None:
        """Close the connections."""


def gone_by_count(head: Head) -> int:
    """How many units were removed, if the store counts; else -1."""
    return head.added - head.length if head.added >= 0 else -1


def lost_by_count(after: str, read: int, head: Head) -> Loss:
    """How many units were removed unread, if the store counts.

    The oldest units are removed first. If the first remaining unit comes after the mark, all units
    that were removed and not read are lost. If all remaining units have been read, all units that
    were ever added and not read are lost.
    """
    is_passed = not head.first or position_number(head.first) > position_number(after)
    if head.added < 0 or read < 0:
        # A consumer leaves the last batch in the store until the next one is done, so something
        # that it has read is still there unless others trimmed it.
        is_unknown = bool(after) and bool(head.first) and is_passed and read < 0
        return Loss(units=-1 if is_unknown else 0)
    if head.last == after:
        return Loss(units=max(0, head.added - read))
    return Loss(units=max(0, head.added - head.length - read) if is_passed else 0)


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

    def bound(self, after: str, rows_max: int, head: Head) -> str:
        """By reading on from `after`."""
        rows = 0
        for batch in self._pages(after, head.last):
            rows += batch.num_rows
            if rows >= rows_max:
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
