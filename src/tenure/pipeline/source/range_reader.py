"""Reads a journal in bulk: where it begins and ends, and how to split it into ranges and read them.

A position is a string that only its reader understands; `schema.position_number` makes positions
comparable. A range is (after, upto]. All calls block. A reader belongs to one process: each Spark
task opens its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec
import pyarrow as pa

from tenure.pipeline.schema import position_number

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

    def bound(self, after: str, units_max: int, head: Head) -> str:
        """A position after `after` with about so many units between, at most the head's last."""

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
    if head.added < 0:
        is_unknown = bool(after) and bool(head.first) and is_passed and read < 0
        return Loss(units=-1 if is_unknown else 0)
    if read < 0:
        return Loss()
    if head.last == after:
        return Loss(units=max(0, head.added - read))
    return Loss(units=max(0, head.added - head.length - read) if is_passed else 0)
