"""Claims cost the same with a million rows beside them; here with a few ten thousand, by plan."""

import asyncio
import re
import sqlite3
import statistics
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tenure.core.job import NewJob
from tenure.core.lease import Report
from tenure.core.outcome import COMPLETED, Outcome
from tenure.core.registry import open_queue
from tenure.core.seam import Queue
from tenure.sql.engine import INBOX, OUTBOX, Row
from tenure.sql.operations import Operation, Operations
from tenure.sql.postgres_engine import PostgresEngine
from tenure.sql.sqlite_engine import SqliteEngine
from tests.contract.adapters import Servers
from tests.contract.inbox_stage import migrated

UNSORTED = {"enable_seqscan": "off", "enable_sort": "off", "enable_bitmapscan": "off"}
JOBS = [NewJob(task="t", payload=b"{}") for _ in range(2_000)]


@pytest.fixture
async def server(servers: Servers) -> AsyncGenerator[str]:
    await migrated(servers.postgres(), "flat")
    yield servers.postgres()
    connection = await asyncpg.connect(servers.postgres())
    await connection.execute("DROP SCHEMA flat CASCADE")
    await connection.close()


async def claims_s(queue: Queue, rounds: int = 30) -> float:
    """The median seconds of a claim of ten."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        leases = await queue.claim(10, wait_ms=0)
        taken.append(time.perf_counter() - began)
        assert len(leases) == 10
    return statistics.median(taken)


async def plan_of(
    server: str, box: str, name: str, *given: object, analyzed: str = "", how: str = ""
) -> str:
    """How PostgreSQL would run an operation; of a batch it is given one row of anything."""
    engine = PostgresEngine(server, schema="flat")
    try:
        await engine.run(box, "counts", queue="q")
        operation = engine.operation(box, name)
        kinds = {"fence": 1, "delay_ms": 0, "retryable": True}
        batch = [[kinds.get(column, "x")] for column in operation.batch]
        statement = operation.statements[0]
        async with engine.database.connection() as connection:
            if analyzed:
                await connection.execute(f"ANALYZE {analyzed}")
            plan = await connection.fetch(f"EXPLAIN {how} {statement}", *batch, *given)
    finally:
        await engine.close()
    return "\n".join(line[0] for line in plan)


@pytest.mark.alone
@pytest.mark.clause("I-7")
@pytest.mark.parametrize("share", [0, 4])
async def test_a_claim_reads_its_own_index_whatever_the_statistics_say(
    server: str, share: int
) -> None:
    given = ("q", 10, 1000, "w", "h", True, -(2**31), -1, 0, share, share)
    text = await plan_of(server, INBOX, "claim+share" if share else "claim", *given)
    assert "inbox_jobs_in_line" in text
    assert "Tid Scan on inbox_jobs" in text
    assert "Seq Scan on inbox_jobs" not in text
    assert "Sort Key: j.priority" not in text.split("CTE taken")[0], text


@pytest.mark.clause("I-7")
async def test_a_settle_looks_up_each_job_once_and_by_its_key(server: str) -> None:
    text = await plan_of(server, INBOX, "settle", "q")
    assert text.count("inbox_jobs_pkey") == 1
    assert "Tid Scan on inbox_jobs" in text
    assert "Seq Scan on inbox_jobs" not in text
    assert "inbox_jobs_leased" not in text  # a partial index that looks cheap, and is not


@pytest.mark.clause("I-36")
async def test_the_next_event_of_a_job_is_not_looked_for_among_all_that_wait(
    server: str,
) -> None:
    """With ten thousand events held back each settle read them all: a tenth of a second."""
    queue = open_queue(f"inbox+{server}?schema=flat&queue=next", worker_id="w")
    hook = {"status_webhook_url": "https://requester.example/hook"}
    await queue.submit([NewJob(task="t", payload=b"{}", options=hook)] * 500)
    leases = await queue.claim(500, wait_ms=0)
    await queue.settle([Outcome(lease, "complete") for lease in leases])
    await queue.close()
    for analyzed in ("", "job_outbox_events"):
        text = await plan_of(server, OUTBOX, "settle", "next/outbox", analyzed=analyzed)
        assert "job_outbox_events_held_back" not in text, text
        assert "Seq Scan on job_outbox_events" not in text, text


@pytest.mark.clause("I-30", "I-32")
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("journal", (0, 9, 10)),
        ("journal_at", (9,)),
        ("find", (9, 0, 10)),
        ("events", ("j.1", 0, 10, 1_000)),
    ],
)
async def test_a_page_of_an_outbox_is_read_by_indexes(
    server: str, name: str, given: tuple[int | str, ...]
) -> None:
    text = await plan_of(server, OUTBOX, name, "q/outbox", *given)
    assert "Seq Scan" not in text
    if name == "events":
        for index in ("job_journal_of_job", "job_outbox_events_pkey", "job_attempts_pkey"):
            assert index in text, text
    else:
        assert text.count("Index Cond: ((queue = ") == 2, text
        assert "Sort  (" not in text, text


REPORTS = 3_000


async def with_reports(url: str) -> str:
    """The id of a job with many reports."""
    queue = open_queue(url, worker_id="w")
    await queue.submit([NewJob(task="t", payload=b"{}")])
    (lease,) = await queue.claim(1, wait_ms=0)
    report = Report(lease=lease, type="token", data=b'{"t":"%b"}' % (b"x" * 200))
    assert await queue.report([report] * REPORTS) == [None] * REPORTS
    await queue.close()
    return lease.job_id


@pytest.mark.clause("I-31")
@pytest.mark.parametrize("after", [0, 10])
async def test_a_page_of_events_reads_no_more_than_the_page(server: str, after: int) -> None:
    job_id = await with_reports(f"inbox+{server}?schema=flat&queue=long")
    given = ("long", job_id, after, 20, 1 << 20)
    plan = await plan_of(server, INBOX, "events", *given, analyzed="job_journal", how="(ANALYZE)")
    rows = [int(rows) for rows in re.findall(r"job_journal .*actual .*rows=(\d+)", plan)]
    assert rows, plan
    assert max(rows) <= 20, plan


@pytest.mark.clause("I-31")
async def test_a_page_of_events_on_sqlite_reads_no_more_than_the_page(tmp_path: Path) -> None:
    job_id = await with_reports(f"inbox+sqlite:///{tmp_path}/long.db?synchronous=normal&queue=long")
    statement = Operations("sqlite", INBOX)["events"].statements[0]
    file = sqlite3.connect(tmp_path / "long.db")
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    file.set_progress_handler(count, 1)
    given = {"queue": "long", "job_id": job_id, "after": 0, "count": 20, "bytes": 1 << 20}
    assert len(file.execute(statement, given).fetchall()) == 20
    file.close()
    assert steps < 2 * REPORTS  # to read all reports takes at least eight instructions for each


@pytest.mark.clause("I-23", "I-28")
@pytest.mark.parametrize(
    ("name", "given", "index"),
    [
        ("prune", ("q", 1, 0, 9), "idempotency_keys_of_job"),
        ("remove", ("q",), "idempotency_keys_of_job"),
        ("trim", ("q", 1), "inbox_jobs_pkey"),
        ("trim", ("q", 1), "idempotency_keys_expiry"),
    ],
)
async def test_jobs_and_their_keys_find_each_other_by_indexes(
    server: str, name: str, given: tuple[object, ...], index: str
) -> None:
    text = await plan_of(server, INBOX, name, *given)
    assert index in text, text
    assert "Seq Scan on i" not in text, text


@pytest.mark.clause("I-32")
async def test_an_outbox_is_read_in_bulk_by_the_queue_of_its_jobs(server: str) -> None:
    connection = await asyncpg.connect(server, server_settings=UNSORTED)
    plan = await connection.fetch(
        "EXPLAIN SELECT * FROM flat.outbox_journal('q/outbox')"
        " WHERE queue = 'q/outbox' AND seq > 3 AND seq <= 9 ORDER BY seq LIMIT 5"
    )
    await connection.close()
    text = "\n".join(row[0] for row in plan)
    assert "Index Cond: ((queue = 'q'::text) AND (seq > 3) AND (seq <= 9))" in text, text
    assert text.count("(seq > 3) AND (seq <= 9)") == 2, text
    assert "Sort  (" not in text, text


@pytest.mark.clause("I-22", "I-36")
@pytest.mark.parametrize(("table", "name"), [(INBOX, "settle"), (OUTBOX, "settle")])
async def test_an_event_finds_the_others_of_its_job_by_their_ids(
    server: str, table: str, name: str
) -> None:
    """Read from one end to the other for every event, a thousand of them took seconds."""
    text = await plan_of(server, table, name, "q")
    found = [line for line in text.splitlines() if " on job_outbox_events before" in line]
    found += [line for line in text.splitlines() if " on job_outbox_events earlier" in line]
    assert len(found) == 2
    assert all("using job_outbox_events_pkey" in line for line in found), text
    assert "Seq Scan on job_outbox_events" not in text


def test_a_claim_on_sqlite_reads_its_own_index(tmp_path: Path) -> None:
    engine = SqliteEngine(f"sqlite:///{tmp_path}/plan.db")

    async def made() -> None:
        await engine.run(INBOX, "heartbeat", queue="q", worker_id="w", slots=1)
        await engine.close()

    asyncio.run(made())
    statement = next(s for s in engine._of_table(INBOX)["claim"].statements if "taking (seq" in s)
    file = sqlite3.connect(tmp_path / "plan.db")
    file.execute("CREATE TEMP TABLE head (now_ms, paused, overdue, next_due_ms)")
    file.execute("CREATE TEMP TABLE taking (turn INTEGER PRIMARY KEY, seq, was)")
    names = ("queue", "count", "now_ms", "share", "requester_max", "worker_id")
    plan = file.execute("EXPLAIN QUERY PLAN " + statement, dict.fromkeys(names, 1)).fetchall()
    file.close()
    text = "\n".join(row[3] for row in plan)
    assert "USING INDEX inbox_jobs_in_line" in text
    assert "TEMP B-TREE FOR ORDER BY" not in text


@pytest.mark.clause("I-12")
async def test_a_line_on_sqlite_that_gave_all_it_was_asked_for_is_claimed_from_without_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    run = SqliteEngine._run

    async def noted(self: SqliteEngine, operation: Operation, *given: Any) -> Sequence[Row]:
        made.append(operation.name)
        return await run(self, operation, *given)

    queue = open_queue(f"inbox+sqlite:///{tmp_path}/look.db?synchronous=normal", worker_id="w")
    await queue.submit([NewJob(task="t", payload=b"{}")] * 5)
    monkeypatch.setattr(SqliteEngine, "_run", noted)
    sizes = [len(await queue.claim(2, wait_ms=0)) for _ in range(5)]
    await queue.close()
    assert sizes == [2, 2, 1, 0, 0]
    assert made == ["peek", "claim", "claim", "claim", "peek", "peek"]


@pytest.mark.alone
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["later", "finished"])
async def test_rows_that_wait_for_later_or_are_finished_do_not_slow_a_claim(
    server: str, kind: str
) -> None:
    url = f"inbox+{server}?schema=flat&synchronous=normal&queue={kind}"
    queue = open_queue(url, worker_id="w")
    await queue.submit(JOBS)
    before_s = await claims_s(queue)
    connection = await asyncpg.connect(server, server_settings={"search_path": "flat"})
    due = "(extract(epoch FROM now()) * 1000)::bigint + 3600000" if kind == "later" else "0"
    columns = "job_id, queue, task, max_attempts, created_ms, updated_ms, payload, priority, ready"
    await connection.execute(
        f"INSERT INTO inbox_jobs ({columns}, due_ms) SELECT 'x{kind}' || n, '{kind}', 't', 1, 1, 1,"
        f" '{{}}', -5, false, {due} FROM generate_series(1, 30000) n"
    )
    if kind == "finished":
        for step in ("'failed', passed = 'claimed>'", "'dead_letter', passed = ''"):
            await connection.execute(
                f"UPDATE inbox_jobs SET status = {step} WHERE job_id LIKE 'xfinished%'"
            )
    await connection.close()
    after_s = await claims_s(queue)
    await queue.close()
    assert after_s < 3 * before_s + 0.005, f"{before_s * 1000:.2f} ms became {after_s * 1000:.2f}"


@pytest.mark.alone
@pytest.mark.timeout(200)
async def test_an_open_transaction_does_not_slow_claims_without_end(server: str) -> None:
    url = f"inbox+{server}?schema=flat&synchronous=normal&queue=held"
    queue = open_queue(url, worker_id="w")
    holder = await asyncpg.connect(server)
    await queue.submit(JOBS * 1)
    before_s = await claims_s(queue)
    await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
    for _ in range(3):
        await queue.submit([NewJob(task="t", payload=b"{}") for _ in range(2_000)])
        while leases := await queue.claim(500, wait_ms=0):
            verdicts = await queue.settle([Outcome(lease, "complete") for lease in leases])
            assert verdicts == [COMPLETED] * len(leases)
    await queue.submit([NewJob(task="t", payload=b"{}") for _ in range(1_000)])
    after_s = await claims_s(queue)
    await holder.close()
    await queue.close()
    assert after_s < 3 * before_s + 0.010, f"{before_s * 1000:.2f} ms became {after_s * 1000:.2f}"


@pytest.mark.clause("I-3")
async def test_a_submit_looks_up_each_key_and_not_all_of_them(server: str) -> None:
    engine = PostgresEngine(server, schema="flat")
    try:
        await engine.run(INBOX, "counts", queue="q")
        operation = engine.operation(INBOX, "submit")
        numbers = {"priority", "delay_ms", "max_attempts", "ttl_ms", "credential_version"}
        numbers.add("storage_creds_encryption_version")
        secret = {"storage_creds_encrypted", "storage_creds_dek_wrapped"}
        arrays = [
            [1] if name in numbers else [b"x"] if name in secret else ["x"]
            for name in operation.batch
        ]
        async with engine.database.connection() as connection:
            plan = await connection.fetch(
                "EXPLAIN " + operation.statements[0], *arrays, "q", 0, 1000, "channel"
            )
    finally:
        await engine.close()
    text = "\n".join(row[0] for row in plan)
    keyed = text.split("idempotency_keys_pkey")[1].splitlines()[1]
    assert "idempotency_key = a.idempotency_key" in keyed, text
