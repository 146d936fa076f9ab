"""A journal for readers in bulk: where it begins and ends, and how to cut and read ranges of it.

Positions are texts that only the reel understands; `place` of `schema` makes them comparable. A
range is (after, upto]. Everything here is blocking and belongs to one process: Spark's tasks open
their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec
import pyarrow as pa

from tenure.pipeline.schema import place

Range = tuple[str, str]
BEGINNING = "0"
"""The position of a reader that has kept nothing yet."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal holds now. "" where it is empty; -1 where the store does not count.

    `added` counts the units (stream entries, rows) ever written, `length` those still there. `end`
    is the position behind which everything new will lie, "" where that is the last entry's own.
    """

    first: str = ""
    last: str = ""
    end: str = ""
    added: int = -1
    length: int = -1


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Units that were gone before they were read; -1: some, and nobody knows how many.

    Not exact: so many at most, some of which may never have been.
    """

    units: int = 0
    is_exact: bool = True


class Read(msgspec.Struct):
    """Counts what a read of a range has seen so far, in the units of `Head`."""

    units: int = 0
    rows: int = 0


class RangeReader(Protocol):
    """A journal, as the pipeline reads it."""

    def head(self) -> Head:
        """What there is now."""

    def bound(self, after: str, units_max: int, head: Head) -> str:
        """A position after `after` with about so many units between, at most the head's last."""

    def gone(self, head: Head) -> int:
        """How many units were removed before anybody looked, at most; -1: unknown."""

    def lost(self, after: str, read: int, head: Head) -> Loss:
        """What is gone after `after` and was not read; `read` counts what was (-1: unknown)."""

    def split(self, after: str, upto: str, parts: int) -> list[Range]:
        """The range cut into at most so many, for readers side by side."""

    def read(self, after: str, upto: str, seen: Read) -> Iterator[pa.RecordBatch]:
        """The events of a range; `seen` grows meanwhile."""

    def captured(self, upto: str, reader: str) -> None:
        """Tell the store that a reader keeps everything up to here; "" takes that back."""

    def close(self) -> None:
        """Let go of connections."""


def gone_by_count(head: Head) -> int:
    """What is gone, where the store counts."""
    return head.added - head.length if head.added >= 0 else -1


def lost_by_count(after: str, read: int, head: Head) -> Loss:
    """What is gone unread, where the store counts.

    The oldest go first. So once the first that is left lies behind the mark, everything that was
    removed and not read is lost; and when all has been read, whatever was ever added and not read.
    """
    is_passed = not head.first or place(head.first) > place(after)
    if head.added < 0:
        is_unknown = bool(after) and bool(head.first) and is_passed and read < 0
        return Loss(units=-1 if is_unknown else 0)
    if read < 0:
        return Loss()
    if head.last == after:
        return Loss(units=max(0, head.added - read))
    return Loss(units=max(0, head.added - head.length - read) if is_passed else 0)
