"""A journal for readers in bulk: where it begins and ends, and how to cut and read ranges of it.

Positions are texts that only the reel understands; `place` of `schema` makes them comparable. A
range is (after, upto]. Everything here is blocking and belongs to one process: Spark's tasks open
their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

import msgspec
import pyarrow as pa

from leasehold.core.opening import journal_tape, parse_url
from leasehold.core.tape import SqlTape, StreamTape

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


def journal_name(url: str) -> str:
    """The name of the journal behind a URL: the contract, its queue, and a mark of the store.

    Credentials and tuning options do not matter: the same history has the same name.
    """
    parsed = parse_url(url)
    tape = journal_tape(url)
    parts = urlsplit(tape.store if tape else parsed.text)
    where = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    what = (tape.key if isinstance(tape, StreamTape) else tape.table + tape.where) if tape else ""
    mark = hashlib.sha256(f"{where} {what}".encode()).hexdigest()[:8]
    queue = tape.queue if tape else parsed.options.get("queue", "")
    words = "".join(c if c.isalnum() else "-" for c in queue).strip("-")
    return f"{parsed.contract}-{words}-{mark}" if words else f"{parsed.contract}-{mark}"


def open_reel(url: str, name: str = "") -> Reel:
    """The journal behind a URL, by what its contract declares of it; rows carry its `name`."""
    tape = journal_tape(url)
    name = name or journal_name(url)
    match tape:
        case StreamTape():
            from leasehold.pipeline.source.stream_reel import StreamReel

            return StreamReel(tape, name)
        case SqlTape():
            from leasehold.pipeline.source.sql_reel import SqlReel

            return SqlReel(tape, name)
        case None:
            from leasehold.pipeline.source.seam_reel import SeamReel

            return SeamReel(url, name)
