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

Range = tuple[str, str]


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal holds now. "" where it is empty; -1 where the store does not count.

    `added` counts the units (stream entries, rows) ever written, `length` those still there.
    """

    first: str = ""
    last: str = ""
    added: int = -1
    length: int = -1


class Read(msgspec.Struct):
    """Counts what a read of a range has seen so far, in the units of `Head`."""

    units: int = 0
    rows: int = 0


class Reel(Protocol):
    """A journal, as the pipeline reads it."""

    def head(self) -> Head:
        """What there is now."""

    def bound(self, after: str, units_max: int, head: Head) -> str:
        """A position after `after` with about so many units between, at most the head's last."""

    def split(self, after: str, upto: str, parts: int) -> list[Range]:
        """The range cut into at most so many, for readers side by side."""

    def read(self, after: str, upto: str, seen: Read) -> Iterator[pa.RecordBatch]:
        """The events of a range; `seen` grows meanwhile."""

    def captured(self, upto: str) -> None:
        """Tell the store that everything up to here is kept elsewhere; "" takes that back."""

    def close(self) -> None:
        """Let go of connections."""
