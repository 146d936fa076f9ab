"""Distributes the proof over Spark tasks.

`proof` makes one row per job from a page of events. Pages are proven in parallel, so the events of
one job may give several rows. These must be brought together and merged. For this, jobs are divided
into parts by a hash, and Spark shuffles by part. A Spark row holds all proof rows that one page has
for one part, packed into one binary value: so Spark does no work per job. Three steps, with a
shuffle between:

    pages of events             -> proof rows, packed by part      (`packed_files`, `packed_events`)
    all proof rows of a part    -> counts, the jobs that need another look, and for each job in a
                                   FIFO queue when it was submitted and claimed          (`judged`)
    all of these of a time span -> whether jobs were claimed in order              (`judged`, too)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from tenure.pipeline.audit import order
from tenure.pipeline.audit.counts import counted
from tenure.pipeline.audit.hashing import Ints
from tenure.pipeline.audit.packing import by_part, pack, restored, shrunk, unpack
from tenure.pipeline.audit.proof import (
    LATE_CLOCK,
    NEEDED,
    PAUSES,
    ROW,
    has,
    has_ended,
    job_keys,
    joined,
    proof,
    unproven,
)
from tenure.pipeline.audit.read_plan import PAGE_ROWS, ReadPlan, pages_of
from tenure.pipeline.lake.files import LakeFiles, gathered

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTS_MIN, PARTS_MAX, PARTS_OF_EVENTS = 2, 512, 8
# How many rows to collect before they are sent on.
_ROWS_AT_ONCE = 1 << 19
# The kinds of rows of `judged`.
JOB, COUNTED, PLACES, SPANS = range(4)

_PACKED_DDL = "part int, rows binary"
_PACKED = pa.schema([("part", pa.int32()), ("rows", pa.binary())])
_JUDGED_DDL = (
    "what int, part int, rows binary, open_question boolean, has_ended boolean, "
    + ", ".join(f"{name} bigint" for name in ROW)
)
_JUDGED = pa.schema(
    [
        *(("what", pa.int32()), ("part", pa.int32()), ("rows", pa.binary())),
        *(("open_question", pa.bool_()), ("has_ended", pa.bool_())),
        *((name, pa.int64()) for name in ROW),
    ]
)
_PROOF_DDL = ", ".join(f"{name} bigint" for name in ROW)


def parts_for(new: DataFrame | ReadPlan) -> int:
    """How many parts to divide the jobs into; one has some ten megabytes."""
    tasks = len(new.tasks) if isinstance(new, ReadPlan) else PARTS_OF_EVENTS
    return min(max(tasks, PARTS_MIN), PARTS_MAX)


def packed(
    spark: SparkSession, new: DataFrame | ReadPlan, parts: int, cut: Collection[str]
) -> DataFrame:
    """The proofs of new events, by part."""
    if isinstance(new, ReadPlan):
        return packed_files(spark, new, parts, cut)
    return packed_events(new, parts, cut)


def packed_files(spark: SparkSession, new: ReadPlan, parts: int, cut: Collection[str]) -> DataFrame:
    """The proofs of files, read where the tasks run."""

    def prove(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        files = LakeFiles(new.lake)
        for batch in batches:
            for number in batch.column("id").to_pylist():
                pages = (
                    page for file_slice in new.tasks[number] for page in pages_of(files, file_slice)
                )
                yield from _packed((proof(page, cut=cut) for page in pages), parts)

    tasks = spark.range(0, len(new.tasks), 1, max(1, len(new.tasks)))
    return tasks.mapInArrow(prove, _PACKED_DDL)


def packed_events(events: DataFrame, parts: int, cut: Collection[str]) -> DataFrame:
    """The proofs of any events that Spark can read."""

    def prove(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from _packed((proof(page, cut=cut) for page in gathered(batches, PAGE_ROWS)), parts)

    return events.where("ver is not null").select(*NEEDED).mapInArrow(prove, _PACKED_DDL)


def packed_proofs(proofs: DataFrame, parts: int) -> DataFrame:
    """Proofs that an earlier audit stored, packed by part."""

    def cut_again(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from _packed((_matrix(batch) for batch in batches), parts)

    return proofs.select(*ROW).mapInArrow(cut_again, _PACKED_DDL)


def judged(packed: DataFrame, parts: int, *, quiesced: bool) -> DataFrame:
    """Jobs that need another look, counts, and claim order by time span, in one pass."""

    def judge(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for part, rows in _jobs_by_part(batches):
            yield from _judgement(part, rows, parts, quiesced)

    def stand_in_line(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        places: defaultdict[int, list[bytes]] = defaultdict(list)
        for batch in batches:
            for row in batch.select(["what", "part", "rows"]).to_pylist():
                if row["what"] == PLACES:
                    places[row["part"]].append(row["rows"])
            yield batch.filter(pa.array(batch.column("what").to_numpy() != PLACES))
        for part, blobs in places.items():
            spans = order.spans(unpack(blobs, order.PLACE))
            yield _wide(SPANS, [part], [pack(spans)])

    by_job = packed.repartition(parts, "part").mapInArrow(judge, _JUDGED_DDL)
    return by_job.repartition(parts, "part").mapInArrow(stand_in_line, _JUDGED_DDL)


def proven(packed: DataFrame, parts: int) -> DataFrame:
    """The proofs themselves, one row per job, for the few checks that need all of them."""

    def show(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = pa.schema([(name, pa.int64()) for name in ROW])
        for _, rows in _jobs_by_part(batches):
            yield pa.RecordBatch.from_arrays(list(rows), schema=schema)

    return packed.repartition(parts, "part").mapInArrow(show, _PROOF_DDL)


def spans_of(blobs: Iterable[bytes]) -> Ints:
    """Spans of lines out of rows of `judged`."""
    return unpack(blobs, order.SPAN)


def _judgement(part: int, rows: Ints, parts: int, quiesced: bool) -> Iterator[pa.RecordBatch]:
    in_doubt = unproven(rows, quiesced=quiesced)
    ended = has_ended(rows)
    yield _wide(COUNTED, [part], [counted(rows, in_doubt)])
    # If any job is in doubt, the order of all jobs is checked again, including those.
    places = order.places(rows, ~in_doubt)
    numbers, blobs = by_part(places, order.span_keys(places), parts)
    yield _wide(PLACES, numbers, blobs)
    asked = np.flatnonzero(in_doubt | ~ended | has(rows, LATE_CLOCK + PAUSES))
    for at in range(0, len(asked), PAGE_ROWS):
        some = asked[at : at + PAGE_ROWS]
        yield _jobs(part, rows[:, some], in_doubt[some], ended[some])


def _jobs(part: int, rows: Ints, in_doubt: np.ndarray, ended: np.ndarray) -> pa.RecordBatch:
    count = rows.shape[1]
    columns = [
        pa.repeat(pa.scalar(JOB, pa.int32()), count),
        pa.repeat(pa.scalar(part, pa.int32()), count),
        pa.nulls(count, pa.binary()),
        pa.array(in_doubt),
        pa.array(ended),
        *(pa.array(row) for row in rows),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_JUDGED)


def _wide(what: int, part: list[int], blobs: list[bytes]) -> pa.RecordBatch:
    named = [pa.repeat(pa.scalar(what, pa.int32()), len(part)), pa.array(part, pa.int32())]
    rest = [pa.nulls(len(part), field.type) for field in list(_JUDGED)[3:]]
    return pa.RecordBatch.from_arrays([*named, pa.array(blobs, pa.binary()), *rest], schema=_JUDGED)


def _packed(proofs: Iterable[Ints], parts: int) -> Iterator[pa.RecordBatch]:
    waiting: list[Ints] = []
    count = 0
    for rows in proofs:
        waiting.append(rows)
        count += rows.shape[1]
        if count >= _ROWS_AT_ONCE:
            yield _in_parts(np.concatenate(waiting, axis=1), parts)
            waiting, count = [], 0
    if waiting:
        yield _in_parts(np.concatenate(waiting, axis=1), parts)


def _in_parts(rows: Ints, parts: int) -> pa.RecordBatch:
    numbers, blobs = by_part(shrunk(rows), job_keys(rows), parts)
    return pa.RecordBatch.from_arrays(
        [pa.array(numbers, pa.int32()), pa.array(blobs, pa.binary())], schema=_PACKED
    )


def _jobs_by_part(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, Ints]]:
    """The jobs of each part, one row each."""
    blobs: defaultdict[int, list[pa.Buffer]] = defaultdict(list)
    for batch in batches:
        for part, rows in zip(batch.column("part").to_pylist(), batch.column("rows"), strict=True):
            blobs[part].append(rows.as_buffer())
    for part in list(blobs):
        yield part, joined(restored(unpack(blobs.pop(part), ROW)))


def _matrix(batch: pa.RecordBatch) -> Ints:
    return np.stack([batch.column(name).to_numpy() for name in ROW])
