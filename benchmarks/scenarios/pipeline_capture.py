"""How many events a second go from a journal in Redis into Parquet files."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.histories import fill_stream
from harness.scenario import Column, Figures, Goal, Scenario, Stage, ratio
from leasehold.core.opening import journal_tape
from leasehold.core.tape import StreamTape
from leasehold.pipeline import SparkSettings, open_session
from leasehold.pipeline.capture import capture
from leasehold.pipeline.lake.files import LakeFiles
from leasehold.pipeline.lake.sink import write_piece
from leasehold.pipeline.schema import COLUMNS
from leasehold.pipeline.source.offsets import Piece
from leasehold.pipeline.source.opening import journal_name, open_reel
from leasehold.store.bulk import BulkRedis

PAGE = 5_000
WARM_UP = 20_000


def measure(stage: Stage, name: str) -> Figures:
    """Fill the stream anew, then let one contender empty it into files."""
    url = f"streams+{stage.server.url}"
    tape = journal_tape(url)
    if not isinstance(tape, StreamTape):
        raise TypeError(tape)
    run = {"plain python": _plain, "one process": _alone}.get(name)
    if run is None:
        return _spark(stage, url, tape, batch=200_000 if name == "leasehold batches" else 0)
    stage.server.fresh()
    events = fill_stream(tape.store, tape.key, stage.jobs)
    began = time.perf_counter()
    rows = run(url, tape)
    took = time.perf_counter() - began
    if rows != events:
        raise RuntimeError(f"{name} wrote {rows} of {events}")
    return {"events_per_s": events / took}


def _spark(stage: Stage, url: str, tape: StreamTape, batch: int) -> Figures:
    spark = open_session(SparkSettings())
    stage.server.fresh()
    fill_stream(tape.store, tape.key, WARM_UP)
    capture(spark, f"{tempfile.mkdtemp()}/lake", [url], once=True)
    stage.server.fresh()
    events = fill_stream(tape.store, tape.key, stage.jobs)
    lake = f"{tempfile.mkdtemp()}/lake"
    began = time.perf_counter()
    done = capture(spark, lake, [url], once=True, max_rows=batch or 2 * events)
    took = time.perf_counter() - began
    if done.events != events:
        raise RuntimeError(f"captured {done.events} of {events}")
    return {"events_per_s": events / took}


def _alone(url: str, tape: StreamTape) -> int:
    """Our own reader and writer in this process, without Spark."""
    lake = LakeFiles(f"{tempfile.mkdtemp()}/lake")
    reel = open_reel(url)
    last = reel.head().last
    reel.close()
    return write_piece(lake, Piece(journal=journal_name(url), url=url, after="", upto=last)).rows


def _plain(url: str, tape: StreamTape) -> int:
    """What a programmer would write with hiredis and pyarrow: split the lines, turn them, write."""
    names = tape.fields
    numbers = {name for name, kind in COLUMNS if kind != "string"}
    schema = pa.schema([(n, pa.int64() if n in numbers else pa.string()) for n in names])
    rows = 0
    with (
        BulkRedis(tape.store) as redis,
        pq.ParquetWriter(f"{tempfile.mkdtemp()}/events.parquet", schema, compression="zstd") as out,
    ):
        for page in redis.pages(tape.key, "", "+", PAGE):
            table = _turned(page, names, numbers)
            out.write_batch(pa.RecordBatch.from_arrays(list(table), schema=schema))
            rows += sum(len(entry[1]) for entry in page) // 2
    return rows


def _turned(page: list[Any], names: tuple[str, ...], numbers: set[str]) -> Iterator[pa.Array]:
    width = len(names)
    parts = [line.decode().split("\t") for entry in page for line in entry[1][1::2]]
    for part in parts:
        part.extend([""] * (width - len(part)))
    for name, column in zip(names, zip(*parts, strict=True), strict=True):
        yield pa.array([int(text or 0) for text in column] if name in numbers else column)


SCENARIO = Scenario(
    name="pipeline_capture",
    title="Events captured per second, from one Redis stream to Parquet",
    about=(
        "The same stream of packed journal lines, twenty an entry. `plain python`: one process "
        "with hiredis and pyarrow. `one process`: our reader and writer without Spark. "
        "`leasehold`: the capture on local[*], exactly once, in one batch; `leasehold batches`: in "
        "batches of 200,000."
    ),
    contenders=("plain python", "one process", "leasehold", "leasehold batches"),
    jobs=1_000_000,
    quick_jobs=20_000,
    headline="events_per_s",
    columns=(Column("events_per_s", "events/s", better="high"),),
    measure=measure,
    goals=(
        Goal(
            "capture reaches 90 % of plain Python",
            ratio("leasehold", "plain python", "events_per_s"),
            least=0.9,
        ),
        Goal(
            "in bounded batches too",
            ratio("leasehold batches", "plain python", "events_per_s"),
            least=0.9,
        ),
    ),
)
