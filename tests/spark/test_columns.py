"""Columns of jobs into an inbox on PostgreSQL: the rows and the answers that a submit gives."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import Any

import asyncpg
import msgspec
import pyarrow as pa
import pytest

from tenure.core.errors import ReplyLost
from tenure.core.registry import open_queue
from tenure.pipeline.source.copying import BoxColumns, Stored, open_columns
from tenure.pipeline.source.writing import Tally, new_jobs, submit_columns
from tenure.store.embedded import EmbeddedPostgres
from tests.contract.inbox_stage import migrated

COUNT = 600
_unique = itertools.count(1)
# What tells one submit from another of the same jobs.
_APART = ("seq", "queue", "job_id", "created_ms", "updated_ms", "ts_ms")


@pytest.fixture
async def schema(postgres: EmbeddedPostgres) -> str:
    name = f"columns_{os.getpid()}_{next(_unique)}"
    await migrated(postgres.url, name)
    return name


@pytest.fixture
def url(postgres: EmbeddedPostgres, schema: str) -> str:
    return f"inbox+{postgres.url}?schema={schema}"


def batch(**columns: Any) -> pa.RecordBatch:
    """Jobs of one task, with what is given in place of their usual columns."""
    plain: dict[str, Any] = {
        "job_id": [f"job-{n:04d}" for n in range(COUNT)],
        "task": ["render"] * COUNT,
        "payload": [f'{{"n":{n},"text":"é\\u0000\\n"}}' for n in range(COUNT)],
    }
    return pa.RecordBatch.from_pydict(plain | columns)


async def put(url: str, *batches: pa.RecordBatch) -> Tally:
    return await asyncio.to_thread(submit_columns, url, list(batches))


async def stored(url: str, schema: str, queue: str) -> list[list[dict[str, Any]]]:
    """The rows of both tables, in their order."""
    connection = await asyncpg.connect(url.removeprefix("inbox+").partition("?")[0])
    tables = []
    try:
        for table in ("inbox_jobs", "job_journal"):
            rows = await connection.fetch(
                f"SELECT right(job_id, 4) AS id, due_ms > 0 AS is_later, t.*"
                f" FROM {schema}.{table} t WHERE queue = $1 ORDER BY seq",
                queue,
            )
            tables.append([_apart(dict(row)) for row in rows])
    finally:
        await connection.close()
    return tables


def _apart(row: dict[str, Any]) -> dict[str, Any]:
    if row["is_later"]:
        row["due_ms"] -= row.get("created_ms") or row["ts_ms"]
    return {name: value for name, value in row.items() if name not in _APART}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "with options": {
        "priority": [-3] * COUNT,
        "delay_ms": [60_000] * COUNT,
        "max_attempts": [2] * COUNT,
    },
    "without options": {"priority": pa.nulls(COUNT, pa.int32()), "gid": pa.nulls(COUNT, "string")},
}


@pytest.mark.parametrize("kind", OPTIONS)
async def test_columns_leave_the_rows_that_a_submit_leaves(
    url: str, schema: str, kind: str
) -> None:
    by_column, by_row = f"{url}&queue=column", f"{url}&queue=row"
    jobs = batch(**OPTIONS[kind])
    box = open_columns(by_column)
    assert box is not None
    try:
        assert await box.store(jobs) == Stored(created=COUNT), "nothing was left to a submit"
    finally:
        await box.close()
    renamed = [
        msgspec.structs.replace(job, job_id=job.job_id.replace("job", "row"))
        for job in new_jobs(jobs)
    ]
    queue = open_queue(by_row, worker_id="w")
    try:
        assert {answer.status for answer in await queue.submit(renamed)} == {"created"}
    finally:
        await queue.close()
    assert await stored(url, schema, "column") == await stored(url, schema, "row")


async def test_a_group_is_left_to_a_submit_which_refuses_it(url: str) -> None:
    jobs = batch(gid=["g é"] * COUNT)
    box = open_columns(url)
    assert box is not None
    try:
        assert (await box.store(jobs)).created == 0
    finally:
        await box.close()
    assert (await put(url, jobs)).invalid == COUNT


async def test_what_is_sent_again_is_there_and_what_is_missing_is_added(url: str) -> None:
    jobs = batch()
    assert await put(url, jobs.slice(0, 250)) == Tally(created=250)
    # The first and the last of a sample are known; then only some between them are.
    assert await put(url, jobs.slice(100, 300)) == Tally(created=150, replayed=150)
    assert await put(url, jobs) == Tally(created=200, replayed=400)
    assert await put(url, jobs) == Tally(replayed=COUNT)


async def test_a_known_job_that_no_sample_met_is_found_by_the_table(url: str) -> None:
    jobs = batch()
    assert await put(url, jobs.slice(101, 1)) == Tally(created=1)
    assert await put(url, jobs) == Tally(created=COUNT - 1, replayed=1)


async def test_an_id_of_another_request_is_a_conflict_and_harms_no_other(url: str) -> None:
    await put(url, batch())
    others = batch().column("payload").to_pylist()
    others[7] = '"another"'
    tally = await put(url, batch(payload=others))
    assert (tally.replayed, tally.conflict) == (COUNT - 1, 1)
    assert "job-0007: this job id is taken" in tally.reasons[0]


async def test_jobs_that_are_not_alike_or_not_sound_are_answered_one_by_one(url: str) -> None:
    ids, payloads = (batch().column(name).to_pylist() for name in ("job_id", "payload"))
    ids[3], ids[5], payloads[9], payloads[11] = ids[2], "no id", "{", None
    payloads[3] = payloads[2]
    tally = await put(
        url, batch(job_id=ids, payload=payloads, priority=[n % 3 for n in range(600)])
    )
    # The twin has another priority than the job whose id it bears.
    assert (tally.created, tally.conflict, tally.invalid) == (COUNT - 4, 1, 3)
    assert sorted(reason.partition(":")[0] for reason in tally.reasons) == sorted(
        ["job-0002", "no id", "job-0009", "job-0011"]
    )


async def test_a_lost_answer_doubles_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BoxColumns.store

    async def losing(box: BoxColumns, jobs: pa.RecordBatch) -> Stored:
        await store(box, jobs)
        raise ReplyLost("the answer was lost")

    monkeypatch.setattr(BoxColumns, "store", losing)
    assert await put(url, batch()) == Tally(replayed=COUNT)


async def test_tasks_that_write_the_same_rows_at_once_make_each_job_once(url: str) -> None:
    told = await asyncio.gather(*(put(url, batch(), batch()) for _ in range(4)))
    assert sum(tally.created for tally in told) == COUNT
    assert sum(tally.replayed for tally in told) == 7 * COUNT


async def test_a_queue_with_a_limit_is_counted_first(url: str) -> None:
    assert open_columns(f"{url}&depth_max=50") is None
    queue = open_queue(url)
    try:
        assert await put(f"{url}&depth_max={COUNT}", batch()) == Tally(created=COUNT)
        assert len(await queue.claim(1, wait_ms=0)) == 1
    finally:
        await queue.close()
