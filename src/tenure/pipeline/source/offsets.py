"""How far journals have been read: offsets that survive restarts, and what is missing.

An offset holds one mark for each journal: the position up to which it was read, the store's count
of everything ever added up to there (-1 if unknown), and the epoch. The epoch rises when a journal
is found to have started again: its store was emptied, or restored from an older copy. What is
missing before a mark (a gap) is part of the mark: so Spark keeps it with the offset, and it comes
out as a row of the batch that found it.

From a queue URL to the name of its journal and to the reader of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec

from tenure.core.journal import SqlFormat, StreamFormat
from tenure.core.registry import journal_format, journal_urls, parse_url
from tenure.pipeline.schema import position_number
from tenure.pipeline.source.ranges import BEGINNING, Head, Loss, RangeReader, SeamRangeReader
from tenure.pipeline.source.sql_reader import SqlRangeReader
from tenure.pipeline.source.stream_reader import StreamRangeReader

Reason = Literal["trimmed", "restarted"]


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a journal that was removed before it was read; `lost` -1: the number is unknown.

    If it is not exact, `lost` is an upper bound.
    """

    journal: str
    url: str
    reason: Reason
    after: str
    until: str
    lost: int = -1
    is_exact: bool = True

    def __str__(self) -> str:
        where = f"between {self.after or 'the beginning'} and {self.until or 'now'}"
        if self.reason == "restarted":
            return (
                f"{self.journal}: the journal began anew {where}: the store was emptied or replaced"
            )
        count = "an unknown number of" if self.lost < 0 else str(self.lost)
        count = count if self.is_exact else f"at most {count}"
        return f"{self.journal}: {count} entries were trimmed {where} before they were read"


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far one journal has been read, and what was missing just before."""

    upto: str = ""
    added: int = -1
    epoch: int = 0
    gap: Gap | None = None

    def follows(self, other: Mark) -> bool:
        """Whether there is anything between the other mark and this one."""
        return (self.epoch, position_number(self.upto)) > (other.epoch, position_number(other.upto))


class JournalRange(msgspec.Struct, frozen=True, kw_only=True):
    """A range of one journal for one reader.

    `base` counts the units before the range that nobody will read: those that were removed before
    the journal was first read, or lost in `gap`.
    """

    journal: str
    url: str
    after: str
    upto: str
    epoch: int = 0
    base: int = 0
    gap: Gap | None = None

    @property
    def name(self) -> str:
        """The name that rows of this range carry: another epoch is another journal."""
        return epoch_name(self.journal, self.epoch)


Offset = dict[str, Any]


def epoch_name(journal: str, epoch: int) -> str:
    """The journal's name; from its second epoch on with the number of the epoch."""
    return f"{journal}.{epoch}" if epoch else journal


def read_offset(offset: Offset | None) -> dict[str, Mark]:
    """The marks of an offset as Spark keeps it."""
    return {name: msgspec.convert(mark, Mark) for name, mark in (offset or {}).items()}


def write_offset(marks: dict[str, Mark]) -> Offset:
    """Marks as Spark wants to keep them."""
    return {name: msgspec.to_builtins(mark) for name, mark in marks.items()}


class Follower:
    """Plans what to read next of some journals. Lives in the driver."""

    def __init__(self, urls: Sequence[str], start: Mapping[str, Mark] | None = None) -> None:
        self._urls = {journal_name(url): url for url in urls}
        self._readers: dict[str, RangeReader] = {}
        self._start = dict(start or {})
        self._target: dict[str, Mark] | None = None

    def begin(self) -> Offset:
        """At the marks to start from; else before the first entry."""
        heads = {name: self._reader(name).head() for name in self._urls}
        return write_offset({name: self._begin(name, head) for name, head in heads.items()})

    def aim(self) -> None:
        """From now on, read no further than what exists at this moment."""
        self._target = {
            name: Mark(upto=head.last, added=head.added)
            for name in self._urls
            if (head := self._reader(name).head()).last
        }

    def latest(self, start: Offset | None, rows_max: int) -> Offset:
        """The end of the next batch, which begins at `start`; 0 means no limit."""
        marks = read_offset(start)
        rows_each = max(1, rows_max // max(1, len(self._urls))) if rows_max else 0
        for name, url in self._urls.items():
            head = self._reader(name).head()
            mark = marks.get(name) or self._begin(name, head)
            marks[name] = self._next(name, url, mark, head, rows_each)
        return write_offset(marks)

    def ranges(self, start: Offset | None, end: Offset, parts: int) -> list[JournalRange]:
        """The ranges between two offsets, for about `parts` parallel readers."""
        before, marks = read_offset(start), read_offset(end)
        moved = [
            name
            for name, mark in marks.items()
            if name in self._urls and mark.follows(before.get(name, Mark()))
        ]
        parts_each = max(1, parts // max(1, len(moved)))
        return [
            journal_range
            for name in moved
            for journal_range in self._ranges(
                name, before.get(name, Mark()), marks[name], parts_each
            )
        ]

    def captured(self, offset: Offset, consumer: str) -> None:
        """Tell the stores that they may trim up to here."""
        for name, mark in read_offset(offset).items():
            if name in self._urls:
                self._reader(name).captured(mark.upto or BEGINNING, consumer)

    def close(self) -> None:
        """Close all journals."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _ranges(self, name: str, old: Mark, mark: Mark, parts: int) -> Iterator[JournalRange]:
        is_same = old.epoch == mark.epoch
        after = old.upto if is_same else ""
        base = max(0, old.added) if is_same and not after else 0
        if mark.gap is not None and mark.gap.reason == "trimmed":
            base += max(0, mark.gap.lost)
        gap = mark.gap
        cut = self._reader(name).split(after, mark.upto, parts) if mark.upto else [("", "")]
        for begin, stop in cut:
            yield JournalRange(
                journal=name,
                url=self._urls[name],
                after=begin,
                upto=stop,
                epoch=mark.epoch,
                base=base,
                gap=gap,
            )
            base, gap = 0, None  # they stand before the first range

    def _begin(self, name: str, head: Head) -> Mark:
        return self._start.get(name) or self._first(name, head)

    def _first(self, name: str, head: Head, epoch: int = 0) -> Mark:
        """Before the first entry; what was removed already does not count as lost."""
        return Mark(added=self._reader(name).gone(head), epoch=epoch)

    def _next(self, name: str, url: str, mark: Mark, head: Head, rows_max: int) -> Mark:
        reader = self._reader(name)
        gap = None
        if began_anew(mark, head):
            gap = _gap(name, url, mark, head, "restarted", Loss(units=-1))
            mark = msgspec.structs.replace(self._first(name, head, mark.epoch + 1), gap=gap)
        lost = reader.lost(mark.upto, mark.added, head)
        if lost.units and gap is None:
            gap = _gap(name, url, mark, head, "trimmed", lost)
        if not head.last or position_number(head.last) <= position_number(mark.upto):
            return mark
        upto = reader.bound(mark.upto, rows_max, head) if rows_max else head.last
        added = head.added if upto == head.last else -1
        wanted = Mark(upto=upto, added=added, epoch=mark.epoch, gap=gap)
        return self._within_target(name, mark, wanted)

    def _within_target(self, name: str, mark: Mark, wanted: Mark) -> Mark:
        if self._target is None:
            return wanted
        target = self._target.get(name)
        if target is None or position_number(target.upto) <= position_number(mark.upto):
            return mark
        if position_number(wanted.upto) <= position_number(target.upto):
            return wanted
        return msgspec.structs.replace(wanted, upto=target.upto, added=target.added)

    def _reader(self, name: str) -> RangeReader:
        if name not in self._readers:
            self._readers[name] = open_reader(self._urls[name], name)
        return self._readers[name]


def began_anew(mark: Mark, head: Head) -> bool:
    """Whether this cannot be the journal that was read up to the mark.

    It ends before the mark; or fewer units were ever added than were read; or everything that is
    there comes after the mark, and fewer units were removed than were read.
    """
    if not mark.upto:
        return False
    end = head.end or head.last
    if not end:
        # If the store does not count, the end of a table may not be certain yet.
        return head.added == 0
    if position_number(end) < position_number(mark.upto) and not _is_open_end(mark.upto):
        return True
    read = mark.added
    if head.added < 0 or read < 0:
        return False
    all_behind = not head.first or position_number(head.first) > position_number(mark.upto)
    return read > head.added or (all_behind and read > head.added - head.length)


def _gap(name: str, url: str, mark: Mark, head: Head, reason: Reason, lost: Loss) -> Gap:
    return Gap(
        journal=epoch_name(name, mark.epoch),
        url=parse_url(url).safe,
        reason=reason,
        after=mark.upto,
        until=head.first,
        lost=lost.units,
        is_exact=lost.is_exact,
    )


def _is_open_end(position: str) -> bool:
    """A mark between two entries (`ms-max`) may come after the last one of its millisecond."""
    return position.endswith(f"-{2**64 - 1}")


def all_journals(urls: Iterable[str]) -> list[str]:
    """The URLs of all journals of these queues: a queue with shards has one in each."""
    return [journal for url in urls for journal in journal_urls(url)]


def journal_name(url: str) -> str:
    """The name of the journal behind a URL: the contract, the queue, and a hash of the store.

    Credentials and tuning options do not matter: the same history has the same name.
    """
    parsed = parse_url(url)
    fmt = journal_format(url)
    parts = urlsplit(fmt.store if fmt else parsed.text)
    where = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    what = (fmt.key if isinstance(fmt, StreamFormat) else fmt.table + fmt.where) if fmt else ""
    mark = hashlib.sha256(f"{where} {what}".encode()).hexdigest()[:8]
    queue = fmt.queue if fmt else parsed.options.get("queue", "")
    words = "".join(c if c.isalnum() else "-" for c in queue).strip("-")
    return f"{parsed.contract}-{words}-{mark}" if words else f"{parsed.contract}-{mark}"


def open_reader(url: str, name: str = "") -> RangeReader:
    """The reader of the journal behind a URL, by its declared format; rows carry `name`."""
    fmt = journal_format(url)
    name = name or journal_name(url)
    match fmt:
        case StreamFormat():
            return StreamRangeReader(fmt, name)
        case SqlFormat():
            return SqlRangeReader(fmt, name)
        case None:
            return SeamRangeReader(url, name)
