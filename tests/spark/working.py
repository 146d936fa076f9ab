"""Real histories for these tests: jobs that complete, fail, are retried, lost, cancelled."""

from __future__ import annotations

from collections.abc import Sequence

from tenure.core.job import NewJob
from tenure.core.journal import JournalEvent
from tenure.core.outcome import Failure, Outcome
from tenure.core.registry import open_journal, open_ledger, open_queue
from tenure.core.seam import Queue
from tenure.pipeline.lake import Lake
from tenure.pipeline.schema import GAPS

# Spark for a few rows: they are done before Java code for them would be written and compiled.
SMALL = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
BROKEN = Failure(code="503", message="the other side is away")


async def work(url: str, jobs: int, *, prefix: str = "j", fail_every: int = 0) -> None:
    """Submit jobs and run them to their end; every n-th fails, is tried again, and is buried."""
    queue = open_queue(url, worker_id="worker-1")
    try:
        for start in range(0, jobs, 500):
            new = [
                NewJob(task=f"task{n % 3}", payload=b'{"n":%d}' % n, job_id=f"{prefix}{n}")
                for n in range(start, min(start + 500, jobs))
            ]
            assert all(answer.accepted for answer in await queue.submit(new))
        await drain(queue, fail_every=fail_every)
    finally:
        await queue.close()


async def drain(queue: Queue, *, fail_every: int = 0) -> None:
    empty = 0
    while empty < 2:
        leases = await queue.claim(100, wait_ms=50)
        empty = 0 if leases else empty + 1
        outcomes = []
        for lease in leases:
            number = int("".join(c for c in lease.job_id if c.isdecimal()) or 0)
            if fail_every and number % fail_every == 0:
                kind = "retry" if lease.attempt == 1 else "bury"
                outcomes.append(Outcome(lease, kind, failure=BROKEN))
            else:
                outcomes.append(Outcome(lease, "complete", result=b'{"ok":true}'))
        await queue.settle(outcomes)


async def journal_of(url: str) -> list[JournalEvent]:
    """The whole journal, through the seam."""
    journal = open_journal(url)
    events: list[JournalEvent] = []
    try:
        while page := await journal.read(after=events[-1].seq if events else "", limit=2_000):
            events += page
    finally:
        await journal.close()
    return events


async def trim(url: str, keep: int) -> None:
    """Trim the journal as a foreign hand would: by length, whatever was captured."""
    from tenure.core.journal import StreamFormat
    from tenure.core.registry import journal_format
    from tenure.store.redis import BulkRedis

    fmt = journal_format(url)
    assert isinstance(fmt, StreamFormat)
    with BulkRedis(fmt.store) as redis:
        redis.call("XTRIM", fmt.key, "MAXLEN", keep)


async def retry_all(url: str, job_ids: Sequence[str]) -> list[str]:
    ledger = open_ledger(url)
    try:
        return await ledger.retry(job_ids)
    finally:
        await ledger.close()


def lake_rows(lake: str) -> list[dict[str, object]]:
    """Every event of the lake by journal and place, read without Spark."""
    rows = [row for row in Lake(lake).events.rows() if row["journal"] != GAPS]
    return sorted(rows, key=lambda row: (row["journal"], row["pos"]))  # type: ignore[arg-type,return-value]


def as_rows(events: Sequence[JournalEvent]) -> list[dict[str, object]]:
    """Events as the lake should hold them, but for the journal's name and the place."""
    fields = JournalEvent.__struct_fields__
    return [{name: getattr(event, name) for name in fields} for event in events]


def without_place(rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    return [{k: v for k, v in row.items() if k not in ("journal", "pos")} for row in rows]
