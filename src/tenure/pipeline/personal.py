"""What a lake knows of people: payloads and results, kept on request, and their erasure.

A journal holds no payloads. `keep_payloads` reads those of jobs that have ended from their stores,
masked by the rules of `core.redaction`, into the table `payloads`: data to train models with. The
table goes as far as the events, so a run that is killed or repeated loses and doubles nothing. What
a store has removed before it was read is not there.

`forget` erases the history of a requester: rows of events, attempts, jobs, violations and payloads.
Sums stay (hourly figures, service levels, totals of the audit): they name no job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import to_arrow_schema

from tenure.core.job import JobRecord
from tenure.core.redaction import Redaction
from tenure.core.registry import machines, open_ledger
from tenure.core.seam import Query
from tenure.pipeline.lake import (
    Lake,
    between,
    day_of,
    forgotten_property,
    lake_events,
    with_kinds,
)
from tenure.pipeline.replay import require_stores, sources
from tenure.pipeline.source.offsets import epoch_name, journal_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAYLOADS = "payloads"
TABLES = ("events", "attempts", "jobs", "violations", PAYLOADS)
TASKS = 4
_CHUNK = 200
_IDS = 5_000
_PAGE = 1_000
_TEXTS = ("journal", "contract", "queue", "job_id", "task", "requester", "state")
_CONTENTS = ("payload", "result", "error")
_NUMBERS = ("fence", "attempt", "created_ms", "ended_ms")
_SCHEMA = pa.schema(
    [pa.field(name, pa.string()) for name in (*_TEXTS, *_CONTENTS)]
    + [pa.field(name, pa.int64()) for name in _NUMBERS]
)
_DDL = ", ".join(
    [f"{name} string" for name in (*_TEXTS, *_CONTENTS)] + [f"{name} bigint" for name in _NUMBERS]
)


class Forgotten(msgspec.Struct, frozen=True, kw_only=True):
    """What was erased: jobs, their rows in all tables; and jobs that have not ended, which stay."""

    jobs: int
    rows: int
    open_jobs: int


def keep_payloads(
    spark: SparkSession, lake: Lake, urls: Sequence[str], more: Sequence[str] = ()
) -> None:
    """Add the payloads of jobs that ended since the last time; `more` names further secrets."""
    upto = lake.events.positions(list(lake.journals()))
    table = lake.table(PAYLOADS)
    after = table.positions(list(upto))
    if after == upto:
        return
    stores = sources(lake, urls)

    def fetch(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        redaction = Redaction(more)
        for batch in batches:
            for start in range(0, batch.num_rows, _CHUNK):
                rows = batch.slice(start, _CHUNK).to_pylist()
                found = asyncio.run(_fetched(rows, stores, redaction))
                yield pa.RecordBatch.from_pylist(found, _SCHEMA)

    ended = with_kinds(lake_events(spark, lake, between(after, upto)))
    ended = ended.where((F.col("to_kind") == "final") & F.col("journal").isin(*stores))
    jobs = ended.groupBy("journal", "job_id").agg(F.max("ts_ms").alias("ended_ms"))
    kept = jobs.repartition(TASKS).mapInArrow(fetch, _DDL)
    rows = kept.withColumn("day", day_of(F.col("ended_ms")))
    table.create(to_arrow_schema(rows.schema), "day")
    table.write(rows, after=after, upto=upto, partition_by="day")


async def _fetched(
    rows: list[dict[str, Any]], stores: Mapping[str, str], redaction: Redaction
) -> list[dict[str, Any]]:
    """The jobs of these rows that their stores still have."""
    found = []
    for journal in sorted({row["journal"] for row in rows}):
        mine = [row for row in rows if row["journal"] == journal]
        ledger = open_ledger(stores[journal])
        try:
            records = await asyncio.gather(*(ledger.get(row["job_id"]) for row in mine))
        finally:
            await ledger.close()
        found += [
            _row(redaction.record(record), row)
            for row, record in zip(mine, records, strict=True)
            if record is not None
        ]
    return found


def _row(record: JobRecord, row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: getattr(record, name, None) for name in (*_TEXTS, *_NUMBERS)}
    contents = {name: getattr(record, name).decode(errors="replace") for name in _CONTENTS}
    return {**kept, **contents, **row}


def forget(
    lake: Lake, urls: Sequence[str], *, requester: str = "", job_ids: Sequence[str] = ()
) -> Forgotten:
    """Erase the jobs of a requester, and those of the given ids, from the lake.

    A journal does not name the requester. So it is asked of the stores, and of the payloads where
    they are kept; jobs that neither knows have to be given by their ids. Jobs that have not ended
    stay, since their history goes on.
    """
    lake.require()
    chosen = {journal: set(job_ids) for journal in lake.journals()}
    if requester:
        for journal, ids in _of_requester(lake, urls, requester).items():
            chosen.setdefault(journal, set()).update(ids)
    ended, is_open = _ended(lake, chosen)
    if not any(ended.values()):
        return Forgotten(jobs=0, rows=0, open_jobs=is_open)
    # First, so that what a store says later of these jobs is no broken promise.
    lake.events.set_properties({forgotten_property(each): "true" for each in ended if ended[each]})
    predicates = [
        f"journal = {_quoted(journal)} and job_id in ({', '.join(map(_quoted, some))})"
        for journal, ids in ended.items()
        for some in _chunks(sorted(ids))
    ]
    rows = sum(lake.table(name).erase(predicates) for name in TABLES)
    return Forgotten(jobs=sum(map(len, ended.values())), rows=rows, open_jobs=is_open)


def _of_requester(lake: Lake, urls: Sequence[str], requester: str) -> dict[str, set[str]]:
    """The ids of a requester's jobs by journal."""
    stores = sources(lake, urls)
    require_stores(lake.journals(), stores)
    found: dict[str, set[str]] = {}
    for url in sorted(set(stores.values())):
        name = journal_name(url)
        journal = epoch_name(name, max(0, lake.events.epoch(name)))
        found[journal] = asyncio.run(_jobs_of(url, requester))
    kept = lake.table(PAYLOADS).rows(pc.field("requester") == requester, ["journal", "job_id"])
    for row in kept:
        found.setdefault(row["journal"], set()).add(row["job_id"])
    return found


async def _jobs_of(url: str, requester: str) -> set[str]:
    found: set[str] = set()
    ledger = open_ledger(url)
    try:
        query = Query(limit=_PAGE)
        while True:
            page = await ledger.find(query)
            found.update(job.job_id for job in page.jobs if job.requester == requester)
            if not page.after:
                return found
            query = msgspec.structs.replace(query, after=page.after)
    finally:
        await ledger.close()


def _ended(lake: Lake, chosen: Mapping[str, set[str]]) -> tuple[dict[str, set[str]], int]:
    """Those of the chosen jobs that have ended, and how many have not."""
    ids = pa.array(sorted(set().union(*chosen.values())), pa.string())
    columns = ["journal", "contract", "job_id", "ver", "type", "to_state"]
    last: dict[tuple[str, str], dict[str, Any]] = {}
    for row in lake.events.rows(pc.field("job_id").isin(ids) & (pc.field("ver") > 0), columns):
        key = row["journal"], row["job_id"]
        if key[1] in chosen.get(key[0], ()) and row["ver"] >= last.get(key, row)["ver"]:
            last[key] = row
    known = machines()
    ended: dict[str, set[str]] = {}
    for (journal, job_id), row in last.items():
        if row["type"] == "remove" or row["to_state"] in known[row["contract"]].final:
            ended.setdefault(journal, set()).add(job_id)
    return ended, len(last) - sum(map(len, ended.values()))


def _chunks(ids: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(ids), _IDS):
        yield ids[start : start + _IDS]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
