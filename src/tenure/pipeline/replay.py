"""Replay: jobs chosen by a condition on the lake go back to their queue, or to another one.

The journal holds no payloads, so the store must still have the job. A job is sent back only if its
state and fence in the store are those that the lake saw last. So a replay that is started again
skips the jobs that it has sent back already.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

from tenure.core.errors import UsageError
from tenure.core.job import JobRecord
from tenure.core.registry import open_ledger
from tenure.core.seam import Ledger
from tenure.pipeline.lake import Lake
from tenure.pipeline.session import one_line
from tenure.pipeline.source.offsets import all_journals, journal_name
from tenure.pipeline.source.writing import JOBS, submit_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TASKS = 4
_CHUNK = 200
_DDL = "answer string, count bigint"
_COUNTS = pa.schema([pa.field("answer", pa.string()), pa.field("count", pa.int64())])


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the jobs: `again` run again, `changed` had moved on, `missing` expired."""

    again: int = 0
    changed: int = 0
    missing: int = 0
    refused: int = 0


def chosen(spark: SparkSession, lake: Lake, where: str) -> DataFrame:
    """Ended jobs by a condition in SQL on the columns of the table `jobs`."""
    rows = lake.read(spark, "jobs")
    with one_line():
        return rows.where(F.col("is_final") & (F.col("state") != "removed")).where(where)


def counted(rows: DataFrame) -> list[dict[str, Any]]:
    """What a replay would touch, by queue, task, state and error."""
    by = ("journal", "contract", "queue", "task", "state", "error_code")
    with one_line():
        return [row.asDict() for row in rows.groupBy(*by).count().orderBy(*by).collect()]


def sources(lake: Lake, urls: Sequence[str]) -> dict[str, str]:
    """The store behind each journal: one of the URLs given, else the one it was captured from."""
    given = {journal_name(url): url for url in all_journals(urls)}
    named = {name: given.get(name.partition(".")[0], "") for name in lake.journals()}
    return lake.urls() | {name: url for name, url in named.items() if url}


def replay(
    rows: DataFrame, stores: dict[str, str], *, to: str = "", rate: float = 0.0, tasks: int = TASKS
) -> Replayed:
    """Send jobs back: to their own queue, or as new jobs to the queue `to`."""

    def send(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        picked = [row for batch in batches for row in batch.to_pylist()]
        counts = asyncio.run(_send(picked, stores, to, rate / tasks))
        yield pa.RecordBatch.from_pylist(
            [{"answer": name, "count": n} for name, n in counts.items()], _COUNTS
        )

    require_stores([row.journal for row in rows.select("journal").distinct().collect()], stores)
    total: dict[str, int] = {}
    chosen_rows = rows.select("journal", "job_id", "fence", "state").repartition(tasks)
    with one_line():
        for row in chosen_rows.mapInArrow(send, _DDL).collect():
            total[row.answer] = total.get(row.answer, 0) + row["count"]
    return Replayed(**total)


def require_stores(journals: Iterable[str], stores: Mapping[str, str]) -> None:
    """Refuse journals whose stores are not known."""
    for journal in journals:
        if journal not in stores:
            raise UsageError(
                f"the lake does not say where {journal} lives (its URL had a password); "
                "name it with --queue URL"
            )


async def _send(
    picked: list[dict[str, Any]], stores: dict[str, str], to: str, rate: float
) -> dict[str, int]:
    counts = {"again": 0, "changed": 0, "missing": 0, "refused": 0}
    for journal in sorted({row["journal"] for row in picked}):
        mine = [row for row in picked if row["journal"] == journal]
        ledger = open_ledger(stores[journal])
        try:
            for start in range(0, len(mine), _CHUNK):
                part = mine[start : start + _CHUNK]
                ready = await _ready(ledger, part, counts)
                if to:
                    await asyncio.to_thread(_elsewhere, ready, journal, to, rate, counts)
                elif ready:
                    answers = await ledger.retry([record.job_id for record in ready])
                    sent = sum(answer == "ok" for answer in answers)
                    counts["again"] += sent
                    counts["changed"] += len(answers) - sent
                    if rate:
                        await asyncio.sleep(len(answers) / rate)
        finally:
            await ledger.close()
    return counts


async def _ready(
    ledger: Ledger, part: list[dict[str, Any]], counts: dict[str, int]
) -> list[JobRecord]:
    """The jobs whose state and fence in the store are those in the lake."""
    records = await asyncio.gather(*(ledger.get(row["job_id"]) for row in part))
    ready = []
    for row, record in zip(part, records, strict=True):
        if record is None:
            counts["missing"] += 1
        elif (record.state, record.fence) != (row["state"], row["fence"]):
            counts["changed"] += 1
        else:
            ready.append(record)
    return ready


def _elsewhere(
    ready: list[JobRecord], journal: str, to: str, rate: float, counts: dict[str, int]
) -> None:
    rows = [
        {
            "job_id": _new_id(journal, record),
            "task": record.task,
            "payload": record.payload,
            "priority": record.priority,
            "gid": record.gid,
            "max_attempts": record.max_attempts or None,
        }
        for record in ready
    ]
    tally = submit_columns(to, [pa.RecordBatch.from_pylist(rows, JOBS)], rate=rate)
    counts["again"] += tally.created
    counts["changed"] += tally.replayed
    counts["refused"] += tally.refused


def _new_id(journal: str, record: JobRecord) -> str:
    """An id by journal, job and fence: a repeated replay submits the same job."""
    words = f"{journal}\n{record.job_id}\n{record.fence}".encode()
    return str(uuid.UUID(bytes=hashlib.sha256(words).digest()[:16]))
