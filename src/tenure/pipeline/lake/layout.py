"""The files of events: their names, which say their range, and which of them are current.

A file is superseded by another of the same journal and day whose range contains its own. A
compaction leaves such files if it is killed before it removes the small ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tenure.pipeline.lake.files import LakeFiles
from tenure.pipeline.schema import position_number

EVENTS = "events"
DAY_MS = 86_400_000


class EventFile(msgspec.Struct, frozen=True, order=True):
    """One Parquet file of events: a range (after, upto] of a journal, those of one day."""

    day: str
    journal: str
    after: int
    upto: int

    @property
    def path(self) -> str:
        """Its path in the lake."""
        return f"{EVENTS}/day={self.day}/{self.name}"

    @property
    def name(self) -> str:
        """The file's own name."""
        return f"{self.journal}~{self.after:019d}~{self.upto:019d}.parquet"

    def covers(self, other: EventFile) -> bool:
        """Whether the other holds nothing that this one does not."""
        same = self.day == other.day and self.journal == other.journal
        return same and self != other and self.after <= other.after and other.upto <= self.upto


def event_file(day: str, journal: str, after: str, upto: str) -> EventFile:
    """The file for a range between two positions."""
    return EventFile(day, journal, position_number(after) if after else 0, position_number(upto))


def parse_name(day: str, name: str) -> EventFile | None:
    """The file of this name; None if the name is not one of ours."""
    stem, dot, kind = name.rpartition(".")
    parts = stem.split("~")
    if dot and kind == "parquet" and len(parts) == 3 and parts[1].isdecimal():
        return EventFile(day, parts[0], int(parts[1]), int(parts[2]))
    return None


def days(lake: LakeFiles) -> list[str]:
    """All days with events, oldest first."""
    return [name[4:] for name in lake.names(EVENTS) if name.startswith("day=")]


def event_files(lake: LakeFiles, of_days: Iterable[str] | None = None) -> list[EventFile]:
    """The current files."""
    found: list[EventFile] = []
    for day in days(lake) if of_days is None else of_days:
        named = (parse_name(day, name) for name in lake.names(f"{EVENTS}/day={day}"))
        found += _counting([file for file in named if file is not None])
    return found


def superseded(lake: LakeFiles) -> list[EventFile]:
    """The superseded files."""
    counting = set(event_files(lake))
    return [
        file
        for day in days(lake)
        for name in lake.names(f"{EVENTS}/day={day}")
        if (file := parse_name(day, name)) is not None and file not in counting
    ]


def _counting(files: list[EventFile]) -> list[EventFile]:
    """By range: a file that begins no earlier and ends no later than one before it is covered."""
    counting: list[EventFile] = []
    for file in sorted(files, key=lambda f: (f.journal, f.after, -f.upto)):
        if not counting or not counting[-1].covers(file):
            counting.append(file)
    return counting
