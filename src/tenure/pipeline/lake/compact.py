"""Merges small files: neighbours of one journal and day become one large file.

Only files from before the last batch are merged, because no batch can write them again. If it is
killed, the small files may remain beside the large one that covers them. Readers ignore them
(`layout`), and the next run removes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from tenure.pipeline.lake.files import ROWS_IN_GROUP, LakeFiles
from tenure.pipeline.lake.layout import EventFile, event_files, superseded
from tenure.pipeline.lake.progress import all_progress
from tenure.pipeline.schema import ARROW, position_number
from tenure.pipeline.source.offsets import epoch_name

FILES_MIN = 8
SMALL_BYTES = 32 << 20
LARGE_BYTES = 256 << 20


def compact(
    lake: LakeFiles,
    *,
    files_min: int = FILES_MIN,
    before_removing: Callable[[], object] = lambda: None,
) -> int:
    """Merge where a day has at least `files_min` small neighbours; returns how many files it saved.

    `before_removing` is called when a large file is there and the small ones still are.
    """
    settled = {
        epoch_name(each.journal, each.epoch): position_number(each.after) if each.after else 0
        for each in all_progress(lake)
    }
    # A large file holds everything in the ranges that it covers.
    for file in superseded(lake):
        if file.upto <= settled.get(file.journal, 0):
            lake.remove(file.path)
    gone = 0
    for run in _runs(lake, settled):
        if len(run) >= files_min:
            _merge(lake, run)
            before_removing()
            for file in run:
                lake.remove(file.path)
            gone += len(run) - 1
    return gone


def _runs(lake: LakeFiles, settled: dict[str, int]) -> Iterator[list[EventFile]]:
    """Groups of small neighbours whose total size is within the limit."""
    old = [file for file in event_files(lake) if file.upto <= settled.get(file.journal, 0)]
    for _, group in groupby(old, key=lambda file: (file.day, file.journal)):
        run: list[EventFile] = []
        total = 0
        for file in sorted(group):
            size = lake.size(file.path)
            if size >= SMALL_BYTES or total + size > LARGE_BYTES:
                yield run
                run, total = [], 0
            if size < SMALL_BYTES:
                run.append(file)
                total += size
        yield run


def _merge(lake: LakeFiles, run: list[EventFile]) -> None:
    merged = EventFile(run[0].day, run[0].journal, run[0].after, run[-1].upto)
    with lake.writer(merged.path, ARROW) as writer:
        for file in run:
            writer.write_table(lake.read_table([file.path], ARROW), ROWS_IN_GROUP)
