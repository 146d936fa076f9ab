"""Plans what each task of an audit reads: a slice of a large file, or several small files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import pyarrow as pa

from tenure.pipeline.audit.proof import FEW, NEEDED
from tenure.pipeline.lake.files import LakeFiles
from tenure.pipeline.lake.layout import EventFile

# Events that are processed together: their arrays fit into the processor's cache.
PAGE_ROWS = 131_072
TASK_BYTES, TASKS_MIN = 8 << 20, 4


class FileSlice(msgspec.Struct, frozen=True):
    """Some row groups of a file: slice `nth` of `of`, only events after the position `after`."""

    path: str
    nth: int
    of: int
    after: int


class ReadPlan(msgspec.Struct, frozen=True):
    """What each task reads of a lake."""

    lake: str
    tasks: tuple[tuple[FileSlice, ...], ...]


def plan_reads(lake: LakeFiles, files: Sequence[EventFile], after: Mapping[str, int]) -> ReadPlan:
    """Divide files into tasks of similar size; only events after a position of each journal."""
    sizes = [lake.size(file.path) for file in files]
    good = min(max(sum(sizes) // TASKS_MIN, TASK_BYTES // 8), TASK_BYTES)
    tasks: list[tuple[FileSlice, ...]] = []
    waiting: list[FileSlice] = []
    room = good
    for file, size in zip(files, sizes, strict=True):
        of = max(1, round(size / good))
        some = [FileSlice(file.path, nth, of, after.get(file.journal, 0)) for nth in range(of)]
        if of > 1:
            tasks += [(file_slice,) for file_slice in some]
            continue
        if waiting and size > room:
            tasks.append(tuple(waiting))
            waiting, room = [], good
        waiting += some
        room -= size
    return ReadPlan(lake.address, (*tasks, tuple(waiting)) if waiting else tuple(tasks))


def pages_of(files: LakeFiles, file_slice: FileSlice) -> Iterator[pa.RecordBatch]:
    """The events of a slice, page by page."""
    pages = files.pages(
        file_slice.path, NEEDED, few=FEW, rows=PAGE_ROWS, nth=file_slice.nth, of=file_slice.of
    )
    for page in pages:
        if not file_slice.after:
            yield page
            continue
        yield page.filter(pa.array(page.column("pos").to_numpy() > file_slice.after))
