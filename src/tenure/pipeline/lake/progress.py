"""How far capture has come with each journal, kept beside Spark's own checkpoint.

Spark stores offsets, but not how many entries were between them, and it may repeat its last batch
after a crash. So the lake records for each journal what the last batch wrote. A repeated batch sees
that its work is done, and counts stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tenure.core.registry import parse_url
from tenure.pipeline.lake.files import LakeFiles
from tenure.pipeline.schema import position_number
from tenure.pipeline.source.offsets import Gap, Mark, epoch_name

PROGRESS = "_capture/journals"
GAPS = "gaps"
CHECKPOINT = "_capture/checkpoint"


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What one task wrote of one range; `repeated`: nothing, it was committed before."""

    journal: str
    url: str
    epoch: int
    base: int
    after: str
    upto: str
    units: int
    rows: int
    files: list[str]
    repeated: bool = False


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One journal, one epoch. `units` counts stream entries or rows, `base` those never seen."""

    journal: str
    url: str
    epoch: int = 0
    base: int = 0
    after: str = ""
    upto: str = ""
    units: int = 0
    rows: int = 0
    ranges: list[Written] = []

    @property
    def is_whole(self) -> bool:
        """Whether it was captured from its very first entry on."""
        return self.base == 0

    def then(self, ranges: Sequence[Written]) -> Progress:
        """After one more batch."""
        ordered = sorted(ranges, key=lambda each: position_number(each.after) if each.after else 0)
        after, upto = ordered[0].after, ordered[-1].upto
        return msgspec.structs.replace(
            self,
            url=parse_url(ordered[0].url).safe,
            base=ordered[0].base if not after else self.base,
            after=after,
            upto=upto,
            units=self.units + sum(each.units for each in ordered),
            rows=self.rows + sum(each.rows for each in ordered),
            ranges=ordered,
        )


def read_progress(lake: LakeFiles, journal: str) -> Progress | None:
    """Of one journal by its name, epoch included."""
    kept = lake.read_json(f"{PROGRESS}/{journal}.json")
    return msgspec.convert(kept, Progress) if kept is not None else None


def all_progress(lake: LakeFiles) -> list[Progress]:
    """Of every journal that was ever captured."""
    names = [name.removesuffix(".json") for name in lake.names(PROGRESS)]
    return [kept for name in names if (kept := read_progress(lake, name)) is not None]


def committed(lake: LakeFiles) -> dict[str, int]:
    """The position up to which each journal, epoch included, is committed to the lake."""
    return {
        epoch_name(each.journal, each.epoch): position_number(each.upto)
        for each in all_progress(lake)
        if each.upto
    }


def mark_of(lake: LakeFiles, journal: str) -> Mark | None:
    """Up to where a journal is in the lake, by its last beginning; None if nothing of it is."""
    known = [each for each in all_progress(lake) if each.journal == journal and each.upto]
    if not known:
        return None
    last = max(known, key=lambda each: each.epoch)
    return Mark(upto=last.upto, epoch=last.epoch)


def write_progress(lake: LakeFiles, progress: Progress) -> None:
    """Replace what was kept."""
    name = epoch_name(progress.journal, progress.epoch)
    lake.write_json(f"{PROGRESS}/{name}.json", progress)


def units_read(lake: LakeFiles, journal: str, mark: Mark) -> int:
    """The units up to a mark that were read, lost, or removed before; -1: unknown."""
    name = epoch_name(journal, mark.epoch)
    progress = read_progress(lake, name)
    if progress is None or progress.upto != mark.upto:
        return -1
    lost = sum(gap.lost for gap in gaps(lake) if gap.journal == name and gap.after != mark.upto)
    return progress.base + progress.units + lost


def note_gap(lake: LakeFiles, gap: Gap) -> None:
    """Record a gap; one at the same position is replaced."""
    at = position_number(gap.after) if gap.after else 0
    lake.write_json(f"{GAPS}/{gap.journal}~{at:019d}.json", gap)


def gaps(lake: LakeFiles) -> list[Gap]:
    """All gaps, by journal and position."""
    found = (lake.read_json(f"{GAPS}/{name}") for name in lake.names(GAPS))
    return [msgspec.convert(gap, Gap) for gap in found if gap is not None]
