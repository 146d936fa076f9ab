"""How far journals have been read: offsets that survive restarts, and what is missing.

An offset holds one mark for each journal: the position up to which it was read, the store's count
of everything ever added up to there (-1 if unknown), and the epoch. The epoch rises when a journal
is found to have started again: its store was emptied, or restored from an older copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from tenure.core.registry import parse_url
from tenure.pipeline.schema import position_number
from tenure.pipeline.source.opening import journal_name, open_reader
from tenure.pipeline.source.range_reader import Head, Loss, RangeReader

Reason = Literal["trimmed", "restarted"]


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """How far one journal has been read."""

    upto: str = ""
    added: int = -1
    epoch: int = 0

    def follows(self, other: Mark) -> bool:
        """Whether there is anything between the other mark and this one."""
        return (self.epoch, position_number(self.upto)) > (other.epoch, position_number(other.upto))


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


class JournalRange(msgspec.Struct, frozen=True, kw_only=True):
    """A range of one journal for one reader.

    `base` counts the units that were already removed when the journal was first read.
    """

    journal: str
    url: str
    after: str
    upto: str
    epoch: int = 0
    base: int = 0

    @property
    def name(self) -> str:
        """The name that rows of this range carry: another epoch is another journal."""
        return epoch_name(self.journal, self.epoch)


Offset = dict[str, Any]
# Called with what is missing after a mark; returns how many units were read up to it, or -1.
ReadSoFar = Callable[[str, Mark], int]
# Called with a journal's name; returns up to where it is known already, or None.
Known = Callable[[str], Mark | None]


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

    def __init__(
        self,
        urls: Sequence[str],
        *,
        on_gap: Callable[[Gap], None],
        read_so_far: ReadSoFar,
        known: Known = lambda _journal: None,
    ) -> None:
        self._urls = {journal_name(url): url for url in urls}
        self._readers: dict[str, RangeReader] = {}
        self._on_gap = on_gap
        self._read_so_far = read_so_far
        self._known = known
        self._target: dict[str, Mark] | None = None

    def begin(self) -> Offset:
        """After what is known already; else before the first entry."""
        heads = {name: self._reader(name).head() for name in self._urls}
        return write_offset({name: self._begin(name, head) for name, head in heads.items()})

    def aim(self) -> None:
        """From now on, read no further than what exists at this moment."""
        self._target = {
            name: Mark(upto=head.last, added=head.added)
            for name in self._urls
            if (head := self._reader(name).head()).last
        }

    def latest(self, start: Offset | None, units_max: int) -> Offset:
        """The end of the next batch, which begins at `start`; 0 means no limit."""
        marks = read_offset(start)
        units_each = max(1, units_max // max(1, len(self._urls))) if units_max else 0
        for name, url in self._urls.items():
            head = self._reader(name).head()
            mark = marks.get(name) or self._begin(name, head)
            marks[name] = self._next(name, url, mark, head, units_each)
        return write_offset(marks)

    def ranges(self, start: Offset | None, end: Offset, parts: int) -> list[JournalRange]:
        """The ranges between two offsets, for about `parts` parallel readers."""
        before, marks = read_offset(start), read_offset(end)
        moved = [
            name
            for name, mark in marks.items()
            if name in self._urls and mark.upto and mark.follows(before.get(name, Mark()))
        ]
        parts_each = max(1, parts // max(1, len(moved)))
        found: list[JournalRange] = []
        for name in moved:
            mark = marks[name]
            old = before.get(name, Mark())
            after = old.upto if old.epoch == mark.epoch else ""
            base = max(0, old.added) if old.epoch == mark.epoch and not after else 0
            for begin, stop in self._reader(name).split(after, mark.upto, parts_each):
                journal_range = JournalRange(
                    journal=name,
                    url=self._urls[name],
                    after=begin,
                    upto=stop,
                    epoch=mark.epoch,
                    base=base,
                )
                found.append(journal_range)
        return found

    def close(self) -> None:
        """Close all journals."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _begin(self, name: str, head: Head) -> Mark:
        return self._known(name) or self._first(name, head)

    def _first(self, name: str, head: Head, epoch: int = 0) -> Mark:
        """Before the first entry; what was removed already does not count as lost."""
        return Mark(added=self._reader(name).gone(head), epoch=epoch)

    def _next(self, name: str, url: str, mark: Mark, head: Head, units_max: int) -> Mark:
        reader = self._reader(name)
        so_far = self._read_so_far(name, mark)
        if began_anew(mark, head, so_far):
            self._on_gap(_gap(name, url, mark, head, "restarted", Loss(units=-1)))
            mark = self._first(name, head, mark.epoch + 1)
            so_far = -1
        lost = reader.lost(mark.upto, so_far if so_far >= 0 else mark.added, head)
        if lost.units:
            self._on_gap(_gap(name, url, mark, head, "trimmed", lost))
        if not head.last or position_number(head.last) <= position_number(mark.upto):
            return mark
        upto = reader.bound(mark.upto, units_max, head) if units_max else head.last
        added = head.added if upto == head.last else -1
        return self._within_target(name, mark, Mark(upto=upto, added=added, epoch=mark.epoch))

    def _within_target(self, name: str, mark: Mark, wanted: Mark) -> Mark:
        if self._target is None:
            return wanted
        target = self._target.get(name)
        if target is None or position_number(target.upto) <= position_number(mark.upto):
            return mark
        if position_number(wanted.upto) <= position_number(target.upto):
            return wanted
        return Mark(upto=target.upto, added=target.added, epoch=mark.epoch)

    def _reader(self, name: str) -> RangeReader:
        if name not in self._readers:
            self._readers[name] = open_reader(self._urls[name], name)
        return self._readers[name]


def began_anew(mark: Mark, head: Head, so_far: int) -> bool:
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
    read = so_far if so_far >= 0 else mark.added
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
