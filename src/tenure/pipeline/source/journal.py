"""The data source `tenure`: any queue URL for `read`, `readStream`, `write`, `writeStream`.

    spark.read.format("tenure").option("url", URL).load()                      the journal
    spark.read.format("tenure").option("url", URL).option("table", "jobs")     the jobs
    spark.readStream.format("tenure").option("url", URL).load()                the journal, followed
    df.write.format("tenure").option("url", URL).option("task", T).mode("append").save()

Options for reading: `url` (or `urls`, one a line), `columns` (only these, since Spark does not tell
a source which it needs), `parts` (how many tasks), `after`, `upto`, `since_ms` (batch only; with
`pushdown` true a filter on `ts_ms` does the last), `max_rows` (about that many per micro-batch),
`fail_on_loss` ("false" goes on if entries were trimmed unread), `starting_offsets` (where a new
query begins: JSON, a mark for each journal), `consumer` (the name under which the stores are told
what was read, so that they trim only that), `markers` ("true": also rows that are no events, see
`markers_of`). For writing see `writing`.

The jobs that a store holds now, as rows (`table=jobs`), read through the ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from tenure.core.errors import StoreError, UsageError
from tenure.core.job import JobRecord
from tenure.core.journal import JournalEvent
from tenure.core.registry import open_ledger, parse_url
from tenure.core.seam import Query
from tenure.pipeline.schema import GAP, GAPS, NAMES, OFFSET, ddl_of, position_number, rows_of
from tenure.pipeline.source.offsets import (
    Follower,
    JournalRange,
    Mark,
    Offset,
    all_journals,
    journal_name,
    open_reader,
    read_offset,
)
from tenure.pipeline.source.ranges import Read

PARTS = 8
_TABLES = ("journal", "jobs")


class TenureSource(DataSource):
    """A queue as a Spark data source."""

    @classmethod
    def name(cls) -> str:
        """The name for `format(...)`."""
        return "tenure"

    def schema(self) -> str:
        """The journal's events, or the jobs."""
        return JOBS_DDL if self._table() == "jobs" else ddl_of(_wanted(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """For a batch."""
        if self._table() == "jobs":
            return JobsReader(_urls(self.options), dict(self.options))
        is_pushed = str(self.options.get("pushdown", "")).lower() == "true"
        return (PushingReader if is_pushed else JournalReader)(dict(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """For a stream; only the journal is one."""
        if self._table() != "journal":
            raise UsageError("only the journal can be followed: leave the option `table` away")
        return JournalStream(dict(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """Rows become jobs."""
        from tenure.pipeline.source.writing import JobWriter

        return JobWriter(dict(self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802
        """Rows of a stream become jobs."""
        from tenure.pipeline.source.writing import JobStreamWriter

        return JobStreamWriter(dict(self.options), schema, overwrite=overwrite)

    def _table(self) -> str:
        table = str(self.options.get("table", "journal"))
        if table not in _TABLES:
            raise UsageError(f"there is no table {table!r} in a queue; there are journal and jobs")
        return table


class RangePartition(InputPartition):
    """One range of one journal."""

    def __init__(self, journal_range: JournalRange) -> None:
        self.journal_range = journal_range


class JournalReader(DataSourceReader):
    """Reads what is in the journals now."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options
        self._columns = _wanted(options)
        self._since_ms = int(options.get("since_ms", 0))

    def partitions(self) -> Sequence[InputPartition]:
        """Ranges of equal time, `parts` for each journal."""
        spans: list[InputPartition] = []
        parts = int(self._options.get("parts", PARTS))
        for url in _urls(self._options):
            name = journal_name(url)
            reader = open_reader(url, name)
            try:
                head = reader.head()
                after = self._options.get("after", "")
                # An entry's id is never earlier than the events in it (streams only).
                if self._since_ms and "-" in head.last:
                    since = f"{max(0, self._since_ms - 1)}-{2**64 - 1}"
                    after = max(after, since, key=position_number)
                upto = self._options.get("upto", "") or head.last
                if upto:
                    cut = reader.split(after, upto, parts)
                    spans += [
                        RangePartition(JournalRange(journal=name, url=url, after=a, upto=b))
                        for a, b in cut
                    ]
            finally:
                reader.close()
        return spans

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task."""
        yield from read_range(cast("RangePartition", partition).journal_range, self._columns)


class PushingReader(JournalReader):
    """The same with filter pushdown: earlier events than the least `ts_ms` are not read.

    Spark refuses such a reader unless `spark.sql.python.filterPushdown.enabled` is true.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Remember the least `ts_ms`; Spark still applies every filter."""
        for each in filters:
            match each:
                case (
                    GreaterThan(attribute=("ts_ms",), value=int(least))
                    | GreaterThanOrEqual(attribute=("ts_ms",), value=int(least))
                    | EqualTo(attribute=("ts_ms",), value=int(least))
                ):
                    self._since_ms = max(self._since_ms, least)
            yield each


class JournalStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows journals; the offset is a mark for each."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options
        self._columns = _wanted(options)
        self._consumer = options.get("consumer", "")
        self._has_markers = options.get("markers", "").lower() == "true"
        self._follower: Follower | None = None
        self._done: Offset | None = None

    def initialOffset(self) -> Offset:  # noqa: N802
        """Where the query is to begin."""
        return self._follow().begin()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """As far as the limit allows."""
        rows = 0 if isinstance(limit, ReadAllAvailable) else getattr(limit, "max_rows", 0)
        latest = self._follow().latest(start, rows)
        if self._options.get("fail_on_loss", "true").lower() != "false":
            before = read_offset(start)
            for name, mark in read_offset(latest).items():
                if mark.gap is not None and mark.follows(before.get(name, Mark())):
                    raise StoreError(f"{mark.gap}; the option fail_on_loss=false goes on without")
        return latest

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """By the option `max_rows`."""
        rows = int(self._options.get("max_rows", 0))
        return ReadMaxRows(rows) if rows else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Stop at the events that exist now."""
        self._follow().aim()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Ranges between two offsets."""
        parts = int(self._options.get("parts", PARTS))
        return [
            RangePartition(journal_range)
            for journal_range in self._follow().ranges(start, end, parts)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task."""
        journal_range = cast("RangePartition", partition).journal_range
        seen = Read()
        yield from read_range(journal_range, self._columns, seen)
        if self._has_markers:
            yield markers_of(journal_range, seen).select(list(self._columns))

    def commit(self, end: Offset) -> None:
        """Tell the stores, one batch late: what is still there shows that nobody trimmed it."""
        if self._consumer and self._done is not None:
            self._follow().captured(self._done, self._consumer)
        self._done = end

    def stop(self) -> None:
        """Close connections."""
        if self._follower is not None:
            self._follower.close()

    def _follow(self) -> Follower:
        if self._follower is None:
            start = msgspec.json.decode(self._options.get("starting_offsets") or "{}")
            self._follower = Follower(_urls(self._options), read_offset(start))
        return self._follower


def read_range(
    journal_range: JournalRange, columns: Sequence[str] = NAMES, seen: Read | None = None
) -> Iterator[pa.RecordBatch]:
    """The events of a range, some columns of them."""
    if not journal_range.upto:
        return
    reader = open_reader(journal_range.url, journal_range.name)
    try:
        for batch in reader.read(journal_range.after, journal_range.upto, seen or Read()):
            yield batch if len(columns) == len(NAMES) else batch.select(list(columns))
    finally:
        reader.close()


def markers_of(journal_range: JournalRange, seen: Read) -> pa.RecordBatch:
    """Rows that are no events (`ver` 0): of type `gap`, one for what is missing before the range;
    of type `offset`, one that says where the range begins and ends, and how many units it had.
    """
    after, upto, gap = journal_range.after, journal_range.upto, journal_range.gap
    told = {
        "after": position_number(after) if after else 0,
        "upto": position_number(upto) if upto else 0,
        "units": seen.units + journal_range.base,
        "base": journal_range.base,
    }
    offset = JournalEvent(
        seq=upto, contract="", queue="", job_id="", type=OFFSET, ts_ms=0,
        data=msgspec.json.encode(told).decode(),
    )  # fmt: skip
    markers = rows_of([offset], journal_range.name)
    if gap is None:
        return markers
    missing = JournalEvent(
        seq=gap.after, contract=parse_url(journal_range.url).contract, queue="", job_id="",
        type=GAP, ts_ms=int(time.time() * 1000), data=msgspec.json.encode(gap).decode(),
    )  # fmt: skip
    return pa.concat_batches([rows_of([missing], GAPS), markers])


def _urls(options: Any) -> list[str]:
    urls = [url.strip() for url in str(options.get("urls", "")).splitlines() if url.strip()]
    if options.get("url"):
        urls.append(str(options["url"]))
    if not urls:
        raise UsageError(
            "the data source needs a queue: .option('url', 'streams+redis://localhost:6379/0')"
        )
    return all_journals(urls)


def _wanted(options: Any) -> tuple[str, ...]:
    named = [name.strip() for name in str(options.get("columns", "")).split(",") if name.strip()]
    unknown = sorted(set(named) - set(NAMES))
    if unknown:
        raise UsageError(f"the journal has no column {unknown[0]!r}; it has {', '.join(NAMES)}")
    return tuple(name for name in NAMES if name in named) or NAMES


_PAGE = 1_000
_SKIPPED = ("extra", "requester")
_KINDS = {str: pa.string(), int: pa.int64(), bytes: pa.string()}
_WORDS = {pa.string(): "string", pa.int64(): "bigint"}

JOBS = pa.schema(
    [
        pa.field("journal", pa.string()),
        *(
            pa.field(field.name, _KINDS[field.type])
            for field in msgspec.structs.fields(JobRecord)
            if field.name not in _SKIPPED
        ),
    ]
)
JOBS_DDL = ", ".join(f"{field.name} {_WORDS[field.type]}" for field in JOBS)


class Store(InputPartition):
    """One queue, and one state of it where only some are wanted."""

    def __init__(self, url: str, state: str = "") -> None:
        self.url = url
        self.state = state


class JobsReader(DataSourceReader):
    """Reads every job of some queues; `states` (with commas) narrows it, a task for each."""

    def __init__(self, urls: Sequence[str], options: Mapping[str, str]) -> None:
        self._urls = list(urls)
        named = options.get("states", "").split(",")
        self._states = [state.strip() for state in named if state.strip()] or [""]

    def partitions(self) -> Sequence[InputPartition]:
        """One for each queue and wanted state."""
        return [Store(url, state) for url in self._urls for state in self._states]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task."""
        store = cast("Store", partition)
        with asyncio.Runner() as runner:
            pages = aiter(_pages(store))
            while (page := runner.run(_next(pages))) is not None:
                yield _rows(page, journal_name(store.url))


async def _pages(store: Store) -> AsyncIterator[list[JobRecord]]:
    ledger = open_ledger(store.url)
    states = (store.state,) if store.state else ()
    try:
        after = ""
        while True:
            page = await ledger.find(Query(states=states, limit=_PAGE, after=after))
            if page.jobs:
                yield page.jobs
            after = page.after
            if not after:
                return
    finally:
        await ledger.close()


async def _next(pages: AsyncIterator[list[JobRecord]]) -> list[JobRecord] | None:
    return await anext(pages, None)


def _rows(jobs: Sequence[JobRecord], journal: str) -> pa.RecordBatch:
    columns = []
    for field in JOBS:
        values = (
            [journal] * len(jobs)
            if field.name == "journal"
            else [_plain(getattr(job, field.name)) for job in jobs]
        )
        columns.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=JOBS)


def _plain(value: object) -> object:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
