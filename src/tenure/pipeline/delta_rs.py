"""Delta tables without a jar: the data source `delta-rs`.

Spark's tasks write Parquet files and the driver commits them with delta-rs, which speaks the same
protocol as Delta's own jar. So any engine that knows Delta reads these tables.

    rows.write.format("delta-rs").option("uri", P).mode("append").save()
    spark.read.format("delta-rs").option("uri", P).load()

A commit is a compare-and-swap on the table's positions: for each journal the position up to which
the table holds its events, kept as a transaction identifier of the log (application: the journal;
version: the position). Events bring their positions with them, in rows of type `offset`, which are
not stored. Other rows have them in options (JSON): `after`, the positions on which they build, and
`upto`, those that they reach. `remove` names values of the partition column whose rows go.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow import fs
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from tenure.core.errors import Conflict
from tenure.pipeline.schema import OFFSET

MOVED = "the table has moved on"

_ROWS_IN_GROUP = 131_072
_ROWS_WAITING_MAX = 1_000_000
_OPEN_MAX = 100
_TRIES = 20
_TEXT_MAX, _LAST = 32, "\U0010ffff"
_UNITS, _BASE = "#units", "#base"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a task wrote: an `add` action of the log."""

    path: str
    size: int
    partition: dict[str, str]
    stats: str


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """A range of a journal that was written, by the positions' numbers; see `markers_of`."""

    after: int
    upto: int
    units: int
    base: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a task did: its files, and the ranges of journals that are in them."""

    parts: list[Part] = []
    ranges: list[tuple[str, Range]] = []


@dataclass
class Written(WriterCommitMessage):
    """A report on its way to the driver."""

    report: bytes


class DeltaRs(DataSource):
    """A Delta table as a Spark data source."""

    @classmethod
    def name(cls) -> str:
        """The name for `format(...)`."""
        return "delta-rs"

    def schema(self) -> StructType:
        """The table's."""
        return from_arrow_schema(arrow_schema(open_table(dict(self.options))))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Reads the files where Spark itself cannot."""
        return DeltaReader(dict(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Writes files; the table must exist."""
        return DeltaWriter(dict(self.options), to_arrow_schema(schema))


def source_of(name: str, fixed: dict[str, str]) -> type[DataSource]:
    """A source for a single table: Spark's catalog gives no options to sources in Python."""

    class One(DeltaRs):
        def __init__(self, options: dict[str, str]) -> None:
            super().__init__({**options, **fixed})

        @classmethod
        def name(cls) -> str:
            return name

    return One


class FilePartition(InputPartition):
    """One file of a version of the table."""

    def __init__(self, version: int, path: str) -> None:
        self.version = version
        self.path = path


class DeltaReader(DataSourceReader):
    """Reads a table file by file; option `where`: a condition by which files are skipped."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """One for each file."""
        table = open_table(self._options)
        where = self._options.get("where") or None
        root = table.table_uri.removeprefix("file://").rstrip("/") + "/"
        uris = table.file_uris(file_pruning_predicate=where)
        # Spark wants at least one.
        paths = [uri.removeprefix("file://").removeprefix(root) for uri in uris] or [""]
        return [FilePartition(table.version(), path) for path in paths]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task."""
        mine = cast("FilePartition", partition)
        table = open_table(self._options, mine.version)
        whole = table.to_pyarrow_dataset(filesystem=file_system(self._options))
        for fragment in whole.get_fragments():
            if fragment.path == mine.path:
                yield from fragment.to_batches(schema=whole.schema, batch_size=_ROWS_IN_GROUP)


class DeltaWriter(DataSourceArrowWriter):
    """Adds files to a table, and removes others, in one commit."""

    def __init__(self, options: dict[str, str], schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._by = options.get("partition_by", "")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Runs in a task."""
        files = _Files(self._options, self._schema, self._by)
        ranges: list[tuple[str, Range]] = []
        for batch in iterator:
            rows = batch.cast(self._schema)
            if "upto" not in self._options:
                rows = _without_offsets(rows, ranges)
            if rows.num_rows:
                files.add(rows)
        return Written(msgspec.json.encode(Report(parts=files.close(), ranges=ranges)))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Runs in the driver."""
        reports = [
            msgspec.json.decode(cast("Written", each).report, type=Report)
            for each in messages
            if each is not None
        ]
        parts = [part for report in reports for part in report.parts]
        ranges = [each for report in reports for each in report.ranges]
        if "upto" not in self._options:
            commit_events(self._options, parts, ranges)
            return
        after: dict[str, int] = msgspec.json.decode(self._options.get("after", "{}"))
        upto: dict[str, int] = msgspec.json.decode(self._options["upto"])
        removed: list[str] = msgspec.json.decode(self._options.get("remove", "[]"))
        commit(self._options, parts, after=after, upto=upto, removed=removed)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """The files are in no version of the table; `vacuum` removes them."""


def open_table(options: Mapping[str, str], version: int | None = None) -> DeltaTable:
    """The table that some options name: `uri`, and `storage` for a bucket."""
    storage = msgspec.json.decode(options.get("storage") or "{}")
    return DeltaTable(options["uri"], version=version, storage_options=storage)


def file_system(options: Mapping[str, str]) -> fs.SubTreeFileSystem:
    """The files of the table, by paths relative to it."""
    storage = msgspec.json.decode(options.get("storage") or "{}")
    path = options["uri"]
    if "://" not in path:
        return fs.SubTreeFileSystem(path, fs.LocalFileSystem())
    if "AWS_ENDPOINT_URL" in storage:
        # Servers that speak S3 and are not Amazon's mostly refuse the checksums of newer clients.
        os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        os.environ.setdefault("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required")
    bucket = fs.S3FileSystem(
        access_key=storage.get("AWS_ACCESS_KEY_ID"),
        secret_key=storage.get("AWS_SECRET_ACCESS_KEY"),
        endpoint_override=storage.get("AWS_ENDPOINT_URL"),
        region=storage.get("AWS_REGION"),
    )
    return fs.SubTreeFileSystem(path.partition("://")[2], bucket)


def arrow_schema(table: DeltaTable) -> pa.Schema:
    """The table's columns."""
    return pa.schema(table.schema().to_arrow())


def positions_of(table: DeltaTable, journals: Mapping[str, int] | list[str]) -> dict[str, int]:
    """Up to where the table goes in these journals; 0 for one that it does not know."""
    return {journal: table.transaction_version(journal) or 0 for journal in journals}


def units_of(table: DeltaTable, journal: str) -> int:
    """How many units of the journal were read or lost up to the table's position; -1: unknown."""
    known = table.transaction_version(f"{journal}{_UNITS}")
    return -1 if known is None else known


def base_of(table: DeltaTable, journal: str) -> int:
    """How many units of the journal had been removed when it was first read."""
    return table.transaction_version(f"{journal}{_BASE}") or 0


def commit_events(
    options: Mapping[str, str], parts: list[Part], ranges: list[tuple[str, Range]]
) -> None:
    """Add events if they begin where the table ends; nothing if it has them already."""
    table = open_table(options)
    after: dict[str, int] = {}
    upto: dict[str, int] = {}
    for journal, each in ranges:
        after[journal] = min(each.after, after.get(journal, each.after))
        upto[journal] = max(each.upto, upto.get(journal, each.upto))
        counted = f"{journal}{_UNITS}"
        if each.base and not each.after:
            upto[f"{journal}{_BASE}"] = each.base
        upto[counted] = each.units + upto.get(counted, max(0, units_of(table, journal)))
    found = positions_of(table, after)
    if after and all(found[journal] >= upto[journal] > 0 for journal in after):
        return  # the batch was repeated
    commit(options, parts, after=after, upto=upto)


def commit(
    options: Mapping[str, str],
    parts: list[Part],
    *,
    after: Mapping[str, int],
    upto: Mapping[str, int],
    removed: list[str] = [],  # noqa: B006 # not changed
) -> None:
    """Add and remove files if the table's positions are still `after`; else raise `Conflict`."""
    now_ms = int(time.time() * 1000)
    adds = [AddAction(p.path, p.size, p.partition, now_ms, True, p.stats) for p in parts]
    transactions = [Transaction(journal, position) for journal, position in upto.items()]
    for _ in range(_TRIES):
        table = open_table(options)
        if positions_of(table, after) != after:
            found = positions_of(table, after)
            raise Conflict(f"{MOVED}: it is at {found}, not at {dict(after)}: {options['uri']}")
        actions: list[AddAction | RemoveAction] = [*adds, *_removals(table, removed, now_ms)]
        if not actions and not transactions:
            return
        try:
            table.create_write_transaction(
                actions, "append", table.schema(), table.metadata().partition_columns,
                # A retry by delta-rs would not look at the positions again.
                commit_properties=CommitProperties(
                    max_commit_retries=0, app_transactions=transactions
                ),
            )  # fmt: skip
        except CommitFailedError:
            continue
        return
    raise Conflict(f"{MOVED}: others write to {options['uri']} all the time")


def _removals(table: DeltaTable, values: list[str], now_ms: int) -> list[RemoveAction]:
    if not values:
        return []
    (column,) = table.metadata().partition_columns
    files = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    return [
        RemoveAction(
            each["path"], True, now_ms, each["size_bytes"], {column: each[f"partition.{column}"]}
        )
        for each in files
        if each[f"partition.{column}"] in values
    ]


def _without_offsets(rows: pa.RecordBatch, ranges: list[tuple[str, Range]]) -> pa.RecordBatch:
    # Events have a contract: a type of this name that another program wrote is none of ours.
    is_offset = pc.and_(
        pc.equal(rows.column("type"), OFFSET), pc.equal(rows.column("contract"), "")
    )
    if not pc.any(is_offset).as_py():
        return rows
    ranges.extend(
        (row["journal"], msgspec.json.decode(row["data"], type=Range))
        for row in rows.filter(is_offset).select(["journal", "data"]).to_pylist()
    )
    return rows.filter(pc.invert(is_offset))


class _Files:
    """The files of one task, one for each value of the partition column."""

    def __init__(self, options: Mapping[str, str], schema: pa.Schema, by: str) -> None:
        self._system = file_system(options)
        self._by = by
        self._stored = pa.schema([field for field in schema if field.name != by])
        self._waiting: dict[str, list[pa.RecordBatch]] = {}
        self._rows = 0
        self._open: dict[str, _File] = {}
        self._closed: list[Part] = []

    def add(self, rows: pa.RecordBatch) -> None:
        """Keep rows until there are enough for a row group."""
        for value, some in self._split(rows):
            self._waiting.setdefault(value, []).append(some)
            self._rows += some.num_rows
            if sum(each.num_rows for each in self._waiting[value]) >= _ROWS_IN_GROUP:
                self._flush(value)
        if self._rows >= _ROWS_WAITING_MAX:
            self._flush_all()

    def close(self) -> list[Part]:
        """Write the rest."""
        self._flush_all()
        self._close_open()
        return self._closed

    def _close_open(self) -> None:
        self._closed += [file.close() for file in self._open.values()]
        self._open.clear()

    def _split(self, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if not self._by:
            yield "", rows
            return
        column = rows.column(self._by)
        bare = rows.drop_columns([self._by])
        for value in pc.unique(column).to_pylist():
            yield value, bare.filter(pc.equal(column, value))

    def _flush_all(self) -> None:
        for value in list(self._waiting):
            self._flush(value)

    def _flush(self, value: str) -> None:
        batches = self._waiting.pop(value)
        self._rows -= sum(each.num_rows for each in batches)
        if value not in self._open:
            if len(self._open) >= _OPEN_MAX:  # garbled times make many days
                self._close_open()
            partition = {self._by: value} if self._by else {}
            self._open[value] = _File(self._system, self._stored, partition)
        self._open[value].write(pa.Table.from_batches(batches, self._stored))


class _File:
    """One file, and what the log says of it."""

    def __init__(
        self, system: fs.SubTreeFileSystem, schema: pa.Schema, partition: dict[str, str]
    ) -> None:
        folder = "".join(f"{name}={value}/" for name, value in partition.items())
        self._path = f"{folder}part-{uuid.uuid4()}.parquet"
        self._partition = partition
        if isinstance(system.base_fs, fs.LocalFileSystem):
            system.create_dir(folder, recursive=True)
        self._stream = system.open_output_stream(self._path)
        self._footer: list[pq.FileMetaData] = []
        self._writer = pq.ParquetWriter(
            self._stream, schema, compression="zstd", compression_level=1,
            metadata_collector=self._footer,
        )  # fmt: skip

    def write(self, rows: pa.Table) -> None:
        """One row group."""
        self._writer.write_table(rows, _ROWS_IN_GROUP)

    def close(self) -> Part:
        """Finish the file."""
        self._writer.close()
        size = self._stream.tell()
        self._stream.close()
        stats = msgspec.json.encode(_stats(self._footer[0])).decode()
        return Part(path=self._path, size=size, partition=self._partition, stats=stats)


def _stats(footer: pq.FileMetaData) -> dict[str, Any]:
    """Of every column the least and the greatest value and how many are null.

    Readers skip files by them. Some take a column without them for one without values, so they are
    complete.
    """
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for group in range(footer.num_row_groups):
        for at in range(footer.num_columns):
            column = footer.row_group(group).column(at)
            found, name = column.statistics, column.path_in_schema
            nulls[name] = nulls.get(name, 0) + (found.null_count if found is not None else 0)
            if found is not None and found.has_min_max:
                least[name] = min(found.min, least.get(name, found.min))
                most[name] = max(found.max, most.get(name, found.max))
    return {
        "numRecords": footer.num_rows,
        "minValues": {name: _short(value) for name, value in least.items()},
        "maxValues": {name: _short(value, _LAST) for name, value in most.items()},
        "nullCount": nulls,
    }


def _short(value: Any, end: str = "") -> Any:
    """A long text is cut; one that is to be the greatest gets an end that none exceeds."""
    if isinstance(value, str) and len(value) > _TEXT_MAX:
        return value[:_TEXT_MAX] + end
    return value
