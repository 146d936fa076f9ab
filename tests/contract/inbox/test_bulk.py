"""Many jobs in one submit: the same rows and the same answers as one by one, all or nothing."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

import pytest

from tenure.core.errors import ServerError
from tenure.core.job import NewJob, Submitted
from tenure.core.seam import Queue
from tenure.sql.engine import IN_BULK
from tenure.sql.schema import check_version
from tenure.store.postgres import Postgres
from tests.contract.inbox.conftest import RawSql
from tests.contract.inbox_stage import InboxStage
from tests.contract.suite.acting import claim

COUNT = IN_BULK + 100


def of_all_kinds(name: str) -> list[NewJob]:
    """Jobs that differ in everything that a submit can say."""
    hook = {"status_webhook_url": "https://requester.example/hook"}
    sealed = {
        "storage_creds_encrypted": b"\0sealed",
        "storage_creds_dek_wrapped": b"wrapped",
        "storage_creds_encryption_version": 1,
        "credential_version": 3,
    }
    return [
        NewJob(
            task=f"task-{number % 3}",
            payload=b'{"number":%d,"text":"\\u0000\xc3\xa9\\"\\\\"}' % number,
            job_id=f"{name}-{number:05d}",
            idempotency_key=f"{name}-key-{number}" if number % 2 else "",
            requester=f"r{number % 5}",
            priority=number % 4 - 1,
            delay_ms=600_000 if number % 7 == 0 else 0,
            max_attempts=None if number % 3 else 2,
            ttl_ms=900_000 if number % 11 == 0 else None,
            trace="t" * (number % 20),
            options={0: hook, 1: sealed, 2: {}}[number % 3],
        )
        for number in range(COUNT)
    ]


async def one_by_one(queue: Queue, jobs: Sequence[NewJob]) -> list[Submitted]:
    """In parts that are too small for COPY."""
    part = IN_BULK // 5
    return [
        answer
        for start in range(0, len(jobs), part)
        for answer in await queue.submit(jobs[start : start + part])
    ]


async def stored(sql: RawSql, name: str) -> tuple[list[Any], list[Any], list[Any]]:
    """Rows of three tables, in their order and without what tells one submit from another."""
    jobs = await sql(
        "SELECT queue, substr(job_id, length(?) + 1), task, status, ready, priority, max_attempts,"
        " due_ms > 0, due_ms - created_ms, expires_ms - created_ms, gid, requester_id,"
        " request_hash, trace, status_webhook_url, refresh_url, payload, payload_h,"
        " credential_version, storage_creds_encrypted, storage_creds_dek_wrapped,"
        " storage_creds_kek_id, storage_creds_encryption_version, claim_version, ver,"
        " updated_ms - created_ms"
        " FROM inbox_jobs WHERE job_id LIKE ? ORDER BY seq",
        *(name, f"{name}-%"),
    )
    notes = await sql(
        "SELECT queue, substr(job_id, length(?) + 1), ver, type, task, from_state, to_state, gid,"
        " priority, due_ms > 0, due_ms - ts_ms, max_attempts, payload_h, fence, attempt"
        " FROM job_journal WHERE job_id LIKE ? ORDER BY seq",
        *(name, f"{name}-%"),
    )
    keys = await sql(
        "SELECT requester_id, request_hash, substr(job_id, length(?) + 1),"
        " expires_ms - created_ms FROM idempotency_keys WHERE job_id LIKE ? ORDER BY job_id",
        *(name, f"{name}-%"),
    )
    relative = [(*row[:8], row[8] if row[7] else 0, max(row[9], 0), *row[10:]) for row in jobs]
    noted = [(*row[:10], row[10] if row[9] else 0, *row[11:]) for row in notes]
    return relative, noted, keys


@pytest.mark.clause("I-1", "I-3")
async def test_a_large_batch_leaves_the_rows_that_small_ones_leave(
    inbox: InboxStage, sql: RawSql
) -> None:
    # Names of one length, so that the rows differ in nothing else.
    large, small = f"l{secrets.token_hex(4)}", f"s{secrets.token_hex(4)}"
    queue = inbox.queue("w1")
    answers = await queue.submit(of_all_kinds(large))
    assert [answer.status for answer in answers] == ["created"] * COUNT
    assert [answer.job_id for answer in answers] == [job.job_id for job in of_all_kinds(large)]
    assert len({answer.created_ms for answer in answers}) == 1
    assert {answer.status for answer in await one_by_one(queue, of_all_kinds(small))} == {"created"}
    assert await stored(sql, large) == await stored(sql, small)


@pytest.mark.raw_writes
@pytest.mark.clause("I-1")
async def test_parts_of_a_submit_that_run_side_by_side_are_in_line_as_they_were_given(
    inbox: InboxStage, sql: RawSql, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[Postgres] = []

    async def checked(database: Postgres) -> None:
        if not answered:  # the first to ask is the last to know
            answered.append(database)
            await asyncio.sleep(0.2)  # the slow answer itself
        await check_version(database)

    monkeypatch.setattr("tenure.sql.postgres_engine.check_version", checked)
    jobs = [NewJob(task="in-line", payload=b"%d" % number) for number in range(6_000 + IN_BULK + 1)]
    answers = await inbox.queue("w1").submit(jobs)
    given = [answer.job_id for answer in answers]
    for table in ("inbox_jobs", "job_journal"):
        rows = await sql(f"SELECT job_id FROM {table} WHERE task = 'in-line' ORDER BY seq")
        assert [row[0] for row in rows] == given
    first = await inbox.ledger.get(given[0])
    assert first is not None
    assert first.payload == b"0"


@pytest.mark.clause("I-2", "I-3")
async def test_a_large_batch_sent_again_gets_the_answers_of_the_first(inbox: InboxStage) -> None:
    name = secrets.token_hex(4)
    queue = inbox.queue()
    await queue.submit(of_all_kinds(name))
    for answers in (
        await queue.submit(of_all_kinds(name)),
        await one_by_one(queue, of_all_kinds(name)),
    ):
        assert {answer.status for answer in answers} == {"replayed"}
        assert [answer.job_id for answer in answers] == [job.job_id for job in of_all_kinds(name)]
    assert (await inbox.ledger.counts()).states["queued"] == COUNT


@pytest.mark.clause("I-1", "I-2", "I-3", "I-4")
async def test_one_known_job_in_a_large_batch_is_answered_as_alone_and_harms_no_other(
    inbox: InboxStage,
) -> None:
    name = secrets.token_hex(4)
    queue = inbox.queue()
    jobs = of_all_kinds(name)
    # None of these places is looked at before the rows go in.
    known = NewJob(task="other", payload=b"{}", job_id=jobs[101].job_id)
    keyed = NewJob(
        task="other", payload=b"{}", idempotency_key=jobs[303].idempotency_key, requester="r3"
    )
    await queue.submit([known, keyed, jobs[205]])
    jobs[407] = NewJob(task="", payload=b"{}", job_id="bad")
    jobs[409] = jobs[3]
    answers = await queue.submit(jobs)
    odd = {101: "conflict", 303: "conflict", 205: "replayed", 407: "invalid", 409: "replayed"}
    assert [answer.status for answer in answers] == [odd.get(n, "created") for n in range(COUNT)]
    events = [event for event in await inbox.journal.read(limit=2_000) if event.type == "submit"]
    assert len(events) == COUNT - len(odd) + 3


@pytest.mark.clause("I-3")
async def test_large_batches_of_the_same_keys_at_once_make_each_job_once(inbox: InboxStage) -> None:
    name = secrets.token_hex(4)
    queues = [inbox.queue() for _ in range(3)]
    batches = [
        [
            NewJob(task="t", payload=b"{}", idempotency_key=f"{name}-{n}", requester="r")
            for n in range(COUNT)
        ]
        for _ in queues
    ]
    batches[1].reverse()
    told = await asyncio.gather(
        *(queue.submit(batch) for queue, batch in zip(queues, batches, strict=True))
    )
    ids: dict[str, set[str]] = {}
    for batch, answers in zip(batches, told, strict=True):
        for sent, answer in zip(batch, answers, strict=True):
            assert answer.accepted, answer
            ids.setdefault(sent.idempotency_key, set()).add(answer.job_id)
    assert sorted(map(len, ids.values())) == [1] * COUNT
    assert (await inbox.ledger.counts()).states["queued"] == COUNT


@pytest.mark.clause("I-1")
@pytest.mark.raw_writes
async def test_a_large_batch_whose_event_cannot_be_written_leaves_nothing(
    inbox: InboxStage, sql: RawSql
) -> None:
    name = secrets.token_hex(4)
    queue = inbox.queue()
    jobs = of_all_kinds(name)
    await inbox.ledger.counts()  # a new file has its tables from its first use
    is_postgres = "postgresql" in inbox.url
    rule = f"no_{name}"
    if is_postgres:
        last = jobs[-1].job_id
        await sql(f"ALTER TABLE job_journal ADD CONSTRAINT {rule} CHECK (job_id <> '{last}')")
    else:
        await sql(
            f"CREATE TRIGGER {rule} BEFORE INSERT ON job_journal WHEN NEW.job_id ="
            f" '{jobs[-1].job_id}' BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
    try:
        with pytest.raises(ServerError):
            await queue.submit(jobs)
    finally:
        await sql(
            f"ALTER TABLE job_journal DROP CONSTRAINT {rule}"
            if is_postgres
            else f"DROP TRIGGER {rule}"
        )
    assert await stored(sql, name) == ([], [], [])
    assert {answer.status for answer in await queue.submit(jobs)} == {"created"}


@pytest.mark.clause("I-12")
@pytest.mark.options(lease_ms=30_000)
async def test_a_large_batch_is_claimed_in_its_order_and_wakes_who_waits(inbox: InboxStage) -> None:
    claimer, producer = inbox.queue("w1"), inbox.queue()
    waiting = asyncio.create_task(claimer.claim(10, wait_ms=20_000))
    jobs = [NewJob(task="t", payload=b'{"n":%d}' % n) for n in range(2 * COUNT)]
    answers = await producer.submit(jobs)
    leases = await waiting
    leases += await claim(claimer, 2 * COUNT - len(leases))
    assert [lease.job_id for lease in leases] == [answer.job_id for answer in answers]


@pytest.mark.clause("I-4")
@pytest.mark.options(depth_max=COUNT - 50)
async def test_a_large_batch_beyond_the_queues_limit_is_stored_as_far_as_there_is_room(
    inbox: InboxStage,
) -> None:
    jobs = [NewJob(task="t", payload=b"{}") for _ in range(COUNT)]
    answers = await inbox.queue().submit(jobs)
    assert [answer.status for answer in answers] == ["created"] * (COUNT - 50) + ["full"] * 50
