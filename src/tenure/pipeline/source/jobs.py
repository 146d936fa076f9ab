"""The jobs that a store holds now, as rows (`table=jobs`), read through the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import cast

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from tenure.core.job import JobRecord
from tenure.core.registry import open_ledger
from tenure.core.seam import Query
from tenure.pipeline.source.opening import journal_name

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
