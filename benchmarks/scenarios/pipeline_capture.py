"""How many events a second go from a journal in Redis or PostgreSQL into a Delta table."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
from adbc_driver_postgresql import dbapi
from deltalake import DeltaTable, write_deltalake

from harness.histories import fill_stream
from harness.postgres import shared_postgres
from harness.scenario import Column, Figures, Goal, Scenario, Stage, ratio
from harness.sql_histories import fill_table, made_ledger
from tenure.core.journal import StreamFormat
from tenure.core.registry import journal_format
from tenure.pipeline import SparkSettings, open_session
from tenure.pipeline.capture import capture
from tenure.pipeline.lake import Lake
from tenure.pipeline.schema import COLUMNS
from tenure.pipeline.source.journal import markers_of, read_range
from tenure.pipeline.source.offsets import JournalRange, journal_name, open_reader
from tenure.pipeline.source.ranges import Read
from tenure.store.journal import lines_of
from tenure.store.redis import BulkRedis

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = 5_000
WARM_UP = 20_000
BATCH = 200_000
TABLE = "tenure.job_journal"
# Where a JDBC driver lies that somebody installed: beside Spark's own, by Debian, by Maven.
JARS = (
    (Path(pyspark.__file__).parent / "jars", "postgresql-*.jar"),
    (Path("/usr/share/java"), "postgresql*.jar"),
    (Path.home() / ".m2" / "repository" / "org" / "postgresql", "**/postgresql-*.jar"),
)


def measure(stage: Stage, name: str) -> Figures:
    """Fill the journal anew, then let one contender empty it into files."""
    run = CONTENDERS[name]
    with _folder() as folder:
        events, took_s = run(stage, folder)
    return {"events_per_s": events / took_s if events else None}


def _plain(stage: Stage, folder: Path) -> tuple[int, float]:
    """What a programmer would write: hiredis reads, Python splits and turns, delta-rs writes."""
    _, fmt = _stream(stage)
    events = fill_stream(fmt.store, fmt.key, stage.jobs)
    names = fmt.fields
    numbers = {name for name, kind in COLUMNS if kind != "string"}
    schema = pa.schema([(n, pa.int64() if n in numbers else pa.string()) for n in names])
    began = time.perf_counter()
    with BulkRedis(fmt.store) as redis:
        batches = (
            pa.RecordBatch.from_arrays(list(_turned(page, names, numbers)), schema=schema)
            for page in redis.pages(fmt.key, "", "+", PAGE)
        )
        write_deltalake(folder / "events", pa.RecordBatchReader.from_batches(schema, batches))
    took_s = time.perf_counter() - began
    rows = DeltaTable(folder / "events").to_pyarrow_dataset().count_rows()
    return _all(rows, events), took_s


def _turned(page: list[Any], names: tuple[str, ...], numbers: set[str]) -> Iterator[pa.Array]:
    width = len(names)
    parts = [line.decode().split("\t") for entry in page for line in lines_of(entry[1])]
    for part in parts:
        part.extend([""] * (width - len(part)))
    for name, column in zip(names, zip(*parts, strict=True), strict=True):
        yield pa.array([int(text or 0) for text in column] if name in numbers else column)


def _alone(stage: Stage, folder: Path) -> tuple[int, float]:
    """Our own reader and writer in this process, without Spark."""
    url, fmt = _stream(stage)
    events = fill_stream(fmt.store, fmt.key, stage.jobs)
    began = time.perf_counter()
    reader = open_reader(url)
    last = reader.head().last
    reader.close()
    journal_range = JournalRange(journal=journal_name(url), url=url, after="", upto=last)
    lake, seen = Lake(str(folder / "lake")), Read()
    lake.begin()

    def batches() -> Iterator[pa.RecordBatch]:
        yield from read_range(journal_range, seen=seen)
        yield markers_of(journal_range, seen)

    lake.events.put_events(batches())
    return _all(seen.rows, events), time.perf_counter() - began


def _from_stream(stage: Stage, folder: Path, batch: int = 0) -> tuple[int, float]:
    spark = _spark()
    url, fmt = _stream(stage)
    fill_stream(fmt.store, fmt.key, WARM_UP)
    capture(spark, str(folder / "warm"), [url], once=True)
    _stream(stage)
    events = fill_stream(fmt.store, fmt.key, stage.jobs)
    began = time.perf_counter()
    done = capture(spark, str(folder / "lake"), [url], once=True, max_rows=batch or 2 * events)
    return _all(done.events, events), time.perf_counter() - began


def _in_batches(stage: Stage, folder: Path) -> tuple[int, float]:
    return _from_stream(stage, folder, BATCH)


def _from_postgres(stage: Stage, folder: Path) -> tuple[int, float]:
    spark = _spark()
    server = shared_postgres().fresh()
    url = made_ledger(server)
    fill_table(server, WARM_UP)
    capture(spark, str(folder / "warm"), [url], once=True)
    server = shared_postgres().fresh()
    url = made_ledger(server)
    events = fill_table(server, stage.jobs)
    began = time.perf_counter()
    done = capture(spark, str(folder / "lake"), [url], once=True, max_rows=2 * events)
    return _all(done.events, events), time.perf_counter() - began


def _by_jdbc(stage: Stage, folder: Path) -> tuple[int, float]:
    """Spark's own way, by numbers of rows in as many parts as there are cores."""
    if not _jar():
        return 0, 0.0
    spark = _spark()
    server = shared_postgres().fresh()
    made_ledger(server)
    fill_table(server, WARM_UP)
    _jdbc(spark, server, WARM_UP, str(folder / "warm"))
    server = shared_postgres().fresh()
    made_ledger(server)
    events = fill_table(server, stage.jobs)
    began = time.perf_counter()
    _jdbc(spark, server, events, str(folder / "events"))
    took_s = time.perf_counter() - began
    return _all(spark.read.parquet(str(folder / "events")).count(), events), took_s


def _jdbc(spark: SparkSession, server: str, events: int, path: str) -> None:
    parts = urlsplit(server)
    options = {
        "url": f"jdbc:postgresql://{parts.hostname}:{parts.port}{parts.path}",
        "user": parts.username or "",
        "password": parts.password or "",
        "driver": "org.postgresql.Driver",
        "dbtable": TABLE,
        "partitionColumn": "seq",
        "lowerBound": "1",
        "upperBound": str(events + 1),
        "numPartitions": str(spark.sparkContext.defaultParallelism),
        "fetchsize": "10000",
    }
    spark.read.format("jdbc").options(**options).load().write.parquet(path)


def _by_adbc(stage: Stage, folder: Path) -> tuple[int, float]:
    """One process without Spark: the driver's Arrow straight into Parquet."""
    server = shared_postgres().fresh()
    made_ledger(server)
    events = fill_table(server, stage.jobs)
    rows = 0
    began = time.perf_counter()
    with dbapi.connect(server) as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {TABLE} ORDER BY seq")
        reader = cursor.fetch_record_batch()
        with pq.ParquetWriter(folder / "events.parquet", reader.schema, compression="zstd") as out:
            for batch in reader:
                out.write_batch(batch)
                rows += batch.num_rows
    return _all(rows, events), time.perf_counter() - began


def _stream(stage: Stage) -> tuple[str, StreamFormat]:
    """An empty stream."""
    stage.server.fresh()
    url = f"streams+{stage.server.url}"
    fmt = journal_format(url)
    if not isinstance(fmt, StreamFormat):
        raise TypeError(fmt)
    return url, fmt


def _all(rows: int, events: int) -> int:
    if rows != events:
        raise RuntimeError(f"{rows} of {events} events arrived")
    return events


def _spark() -> SparkSession:
    jar = _jar()
    return open_session(SparkSettings(conf={"spark.jars": jar} if jar else {}))


@cache
def _jar() -> str:
    found = [path for folder, pattern in JARS for path in sorted(folder.glob(pattern))]
    return str(found[-1]) if found else ""


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tenure-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


CONTENDERS = {
    "plain python": _plain,
    "one process": _alone,
    "tenure": _from_stream,
    "in batches": _in_batches,
    "postgres": _from_postgres,
    "postgres jdbc": _by_jdbc,
    "postgres adbc": _by_adbc,
}

SCENARIO = Scenario(
    name="pipeline_capture",
    title="Events captured per second into a Delta table",
    about=(
        "From the same Redis stream of a journal, up to twenty events an entry: `plain python` is "
        "one process with hiredis, pyarrow and delta-rs, `one process` our reader and writer "
        "without Spark, `tenure` the capture on local[*], exactly once, in one batch, "
        "`in batches` in batches of 200,000. From the journal of an inbox on PostgreSQL: "
        "`postgres` is the capture, `postgres jdbc` Spark's own JDBC source to Parquet with a part "
        "for every core "
        "(where a JDBC driver is installed), `postgres adbc` one process without Spark."
    ),
    contenders=tuple(CONTENDERS),
    jobs=1_000_000,
    quick_jobs=20_000,
    headline="events_per_s",
    columns=(Column("events_per_s", "events/s", better="high"),),
    measure=measure,
    goals=(
        Goal(
            "capture reaches one and a half times plain Python",
            ratio("tenure", "plain python", "events_per_s"),
            least=1.5,
        ),
        Goal(
            "in bounded batches too",
            ratio("in batches", "plain python", "events_per_s"),
            least=1.5,
        ),
        Goal(
            "from PostgreSQL it takes at most 1.2 times as long as Spark's JDBC",
            ratio("postgres jdbc", "postgres", "events_per_s"),
            most=1.2,
        ),
    ),
)
