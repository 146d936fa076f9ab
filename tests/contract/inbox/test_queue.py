"""The rest of the contract on both engines: storing, waiting, ending, keeping, reading."""

import asyncio
import time

import msgspec
import pytest

from tenure.cli.doctor import postgres_findings, sqlite_findings
from tenure.contracts.inbox.credentials import SealedColumns
from tenure.core.errors import LeaseLost, ServerError, StoreError
from tenure.core.lease import Lease, Report
from tenure.core.outcome import COMPLETED, Outcome, OutcomeKind
from tenure.core.registry import open_journal, open_queue, parse_url
from tenure.core.seam import Query
from tenure.sql.engine import INBOX
from tests.contract.inbox.conftest import RawSql
from tests.contract.inbox_stage import InboxStage
from tests.contract.suite.acting import (
    answered,
    claim,
    claim_one,
    job,
    nothing_to_claim,
    record,
    run_out,
    settle,
    state,
    submit,
)


@pytest.mark.clause("I-1", "I-4")
async def test_a_job_is_stored_with_its_event_or_not_at_all(inbox: InboxStage, sql: RawSql) -> None:
    queue = inbox.queue()
    answers = await queue.submit([job("good"), job("bad", task=""), job("odd", payload=b"{")])
    assert [answer.status for answer in answers] == ["created", "invalid", "invalid"]
    assert all(answer.reason for answer in answers[1:])
    jobs = await sql("SELECT job_id, status, ready FROM inbox_jobs WHERE job_id IN ('good', 'bad')")
    assert [tuple(map(bool, row[2:])) for row in jobs] == [(True,)]
    assert [event.type for event in await inbox.journal.read()] == ["submit"]


@pytest.mark.clause("I-12")
async def test_a_claimer_is_woken_from_another_connection_within_a_moment(
    inbox: InboxStage,
) -> None:
    claimer, producer = inbox.queue("w1"), inbox.queue()
    assert await claimer.claim(1, wait_ms=20) == []
    waited = []
    for _ in range(3):
        waiting = asyncio.create_task(claimer.claim(1, wait_ms=20_000))
        await asyncio.sleep(0.2)  # it has to be asleep: the promise is about waking up
        began = time.monotonic()
        await submit(producer, job())
        (lease,) = await waiting
        waited.append(time.monotonic() - began)
        await settle(claimer, lease, "complete")
    assert min(waited) < 0.4, f"a poll comes after half a second at the earliest: {waited}"


@pytest.mark.clause("I-13")
async def test_leases_of_a_lost_answer_are_handed_out_again(inbox: InboxStage) -> None:
    queue, lose = await inbox.lossy_queue("w1")
    ids = await submit(queue, *[job(max_attempts=1) for _ in range(4)])
    lose()
    with pytest.raises(StoreError):
        await queue.claim(4, wait_ms=0)
    leases = await answered(lambda: claim(queue, 4))
    assert sorted(lease.job_id for lease in leases) == sorted(ids)
    assert await queue.settle([Outcome(lease, "complete") for lease in leases]) == [COMPLETED] * 4


@pytest.mark.clause("I-11", "I-17")
@pytest.mark.parametrize("results", [(b"null",), (b"null", b'{"n":1}')])
async def test_a_batch_is_settled_lease_by_lease_whatever_it_has_in_common(
    inbox: InboxStage, results: tuple[bytes, ...]
) -> None:
    queue = inbox.queue("w1")
    await submit(queue, *[job() for _ in range(6)])
    leases = [*await claim(queue, 3), *await claim(queue, 3)]
    stale = leases[2]
    await settle(queue, stale, "complete")
    outcomes = [
        Outcome(lease, "complete", result=results[at % len(results)])
        for at, lease in enumerate(leases)
        if lease is not stale
    ]
    lost = Outcome(msgspec.structs.replace(stale, fence=7), "complete")
    *verdicts, last = await queue.settle([*outcomes, lost])
    assert verdicts == [COMPLETED] * 5
    assert isinstance(last, LeaseLost)
    assert await queue.settle(outcomes) == [COMPLETED] * 5, "sent again"
    for outcome in outcomes:
        record = await inbox.ledger.get(outcome.lease.job_id)
        assert record is not None
        assert (record.state, record.result) == ("succeeded", outcome.result)


@pytest.mark.clause("I-15")
async def test_news_are_written_in_order_and_progress_is_the_last(inbox: InboxStage) -> None:
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, job())
    lease = await claim_one(queue)
    news = [Report(lease=lease, type="token", data=b'{"n":%d}' % n) for n in range(6)]
    news[2:2] = [Report(lease=lease, progress=b"10"), Report(lease=lease, progress=b"20")]
    news.append(Report(lease=lease, type="stage", step="processing"))
    assert await queue.report(news) == [None] * 9
    stored = await record(inbox, job_id)
    assert (stored.progress, stored.state) == (b"20", "processing")
    told = await inbox.ledger.events(job_id)
    tokens = [msgspec.json.decode(event.data)["n"] for event in told if event.type == "token"]
    assert tokens == [0, 1, 2, 3, 4, 5]


@pytest.mark.clause("I-16", "I-30")
async def test_each_ended_attempt_has_its_row(inbox: InboxStage) -> None:
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=9))
    for kind in ("retry", "release", "snooze"):
        await settle(queue, await claim_one(queue), kind)  # type: ignore[arg-type]
    await claim_one(queue)
    await run_out(inbox)
    await settle(queue, await claim_one(queue), "complete")
    rows = await inbox.ledger.attempts(job_id)  # type: ignore[attr-defined]
    assert [(row["claim_version"], row["attempt"], row["verdict"]) for row in rows] == [
        *((1, 1, "retry"), (2, 2, "release"), (3, 2, "snooze"), (4, 2, "lost")),
        (5, 3, "complete"),
    ]
    assert all(row["ended_ms"] >= row["claimed_ms"] > 0 for row in rows)


@pytest.mark.clause("I-30")
async def test_of_many_attempts_with_long_errors_the_newest_are_read(
    inbox: InboxStage, sql: RawSql
) -> None:
    queue = inbox.queue()
    (job_id,) = await submit(queue, job())
    for _ in range(105):
        await settle(queue, await claim_one(queue), "release")
    newest = [row["claim_version"] for row in await inbox.ledger.attempts(job_id)]  # type: ignore[attr-defined]
    assert newest == list(range(6, 106))
    await sql(f"UPDATE job_attempts SET error = '{'x' * 1_000_000}' WHERE claim_version > 50")
    newest = [row["claim_version"] for row in await inbox.ledger.attempts(job_id)]  # type: ignore[attr-defined]
    assert newest == list(range(101, 106))


@pytest.mark.clause("I-17")
async def test_an_outcome_sent_again_is_answered_alike_while_another_attempt_runs(
    inbox: InboxStage,
) -> None:
    queue, other = inbox.queue("w1"), inbox.queue("w2")
    await submit(queue, job(max_attempts=5))
    outcome = Outcome(await claim_one(queue), "retry")
    first = await queue.settle([outcome])
    current = await claim_one(other)
    assert await queue.settle([outcome]) == first
    changed = Outcome(outcome.lease, "complete", b"1")
    assert isinstance((await queue.settle([changed]))[0], LeaseLost)
    assert await settle(other, current, "complete") == COMPLETED


@pytest.mark.clause("I-19", "I-21")
async def test_what_is_not_due_is_not_in_the_line_and_what_is_too_old_is_given_up(
    inbox: InboxStage, sql: RawSql
) -> None:
    queue = inbox.queue("w1")
    late, _ = await submit(queue, job("late", delay_ms=400), job("old", ttl_ms=100, delay_ms=300))
    ((ready,),) = await sql("SELECT ready FROM inbox_jobs WHERE job_id = ?", late)
    assert not ready
    assert await queue.claim(5, wait_ms=0) == []
    await inbox.advance(400)
    assert [lease.job_id for lease in await claim(queue, 1)] == ["late"]
    stored = await record(inbox, "old")
    assert (stored.state, b"expired" in stored.error) == ("dead_letter", True)


@pytest.mark.clause("I-24")
@pytest.mark.raw_writes
async def test_the_journal_forgets_what_is_old_but_not_what_lists_a_job(inbox: InboxStage) -> None:
    queue = inbox.queue("w1")
    kept, gone = await submit(queue, job("kept-j"), job("gone-j"))
    for lease in await claim(queue, 2):
        await settle(queue, lease, "complete")
    await inbox.ledger.remove([gone])
    await inbox.advance(20)
    forgetful = open_queue(f"{inbox.url}&journal_days=0.0000001", worker_id="w2")
    await forgetful.upkeep()
    await forgetful.close()
    assert [(event.type, event.job_id) for event in await inbox.journal.read()] == [
        ("submit", kept)
    ]
    assert [each.job_id for each in (await inbox.ledger.find(Query())).jobs] == [kept]


@pytest.mark.clause("I-25")
async def test_counts_tell_states_workers_and_the_oldest(inbox: InboxStage) -> None:
    queue = inbox.queue("w1")
    await submit(queue, *[job() for _ in range(3)])
    await claim_one(queue)
    await queue.upkeep()
    await inbox.advance(30)
    counts = await inbox.ledger.counts()
    assert (counts.states["queued"], counts.states["claimed"], counts.workers) == (2, 1, 1)
    assert 20 <= counts.oldest_waiting_ms < 60_000


@pytest.mark.clause("I-26", "I-27", "I-28")
async def test_a_job_is_cancelled_begun_anew_and_removed(inbox: InboxStage, sql: RawSql) -> None:
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, job("steered", idempotency_key="steered"))
    assert await inbox.ledger.cancel([job_id, "nobody"]) == ["ok", "missing"]
    stored = await record(inbox, job_id)
    assert (stored.state, stored.fence) == ("dead_letter", 0)
    assert b"cancelled" in stored.error
    assert await inbox.ledger.retry([job_id]) == ["ok"]
    lease = await claim_one(queue)
    assert (lease.attempt, lease.fence) == (1, 1)
    assert await inbox.ledger.remove([job_id]) == ["claimed"]
    await settle(queue, lease, "complete")
    assert await inbox.ledger.remove([job_id]) == ["ok"]
    for table in ("inbox_jobs", "job_attempts", "idempotency_keys"):
        assert await sql(f"SELECT 1 FROM {table} WHERE job_id = ?", job_id) == []


@pytest.mark.clause("I-29")
async def test_a_pause_holds_against_claims_under_way(inbox: InboxStage) -> None:
    queues = [inbox.queue(f"w{n}") for n in range(3)]
    await submit(queues[0], *[job() for _ in range(60)])

    async def work(queue: object) -> None:
        for _ in range(10):
            await queue.claim(2, wait_ms=0)  # type: ignore[attr-defined]

    async def steer() -> None:
        for _ in range(4):
            await inbox.ledger.pause()
            await inbox.ledger.resume()
        await inbox.ledger.pause()

    await asyncio.gather(steer(), *map(work, queues))
    assert await nothing_to_claim(queues[0])  # and the history is judged: no claim while paused


@pytest.mark.clause("I-31")
async def test_events_of_a_job_are_read_after_any_cursor(inbox: InboxStage) -> None:
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, job())
    lease = await claim_one(queue)
    await queue.report([Report(lease=lease, type="token") for _ in range(3)])
    await settle(queue, lease, "complete")
    whole = await inbox.ledger.events(job_id)
    assert [event.type for event in whole] == [
        *("queued", "claimed", "token", "token", "token", "succeeded")
    ]
    for at, event in enumerate(whole):
        assert await inbox.ledger.events(job_id, after=event.event_id) == whole[at + 1 :]


@pytest.mark.raw_writes  # an id that is used twice: the judge takes both jobs for one
async def test_a_job_under_the_id_of_a_removed_one_shows_none_of_its_events(
    inbox: InboxStage,
) -> None:
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, job(requester="anna"))
    lease = await claim_one(queue)
    await queue.report([Report(lease=lease, step="of anna", data=b'{"iban":"DE1"}')])
    await settle(queue, lease, "complete")
    assert await inbox.ledger.remove([job_id]) == ["ok"]
    await submit(queue, job(job_id, requester="bert"))
    assert [event.type for event in await inbox.ledger.events(job_id)] == ["queued"]
    lease = await claim_one(queue)
    await queue.report([Report(lease=lease, step="of bert", data=b"{}")])
    await settle(queue, lease, "complete")
    shown = await inbox.ledger.events(job_id)
    assert [event.event_id for event in shown] == ["1", "2", "3", "4"]
    assert "of anna" not in [event.step for event in shown]


@pytest.mark.clause("I-31", "I-32")
@pytest.mark.parametrize("steps", [(), ("complete",), ("release", "complete"), ("retry", "bury")])
@pytest.mark.parametrize("delay_ms", [0, 1])
async def test_the_events_of_a_job_are_those_that_the_whole_history_has_of_it(
    inbox: InboxStage, steps: tuple[OutcomeKind, ...], delay_ms: int
) -> None:
    """Wherever each is kept: by the job's row, an attempt's or the journal's."""
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, job(delay_ms=delay_ms))
    leases = []
    for step in steps:
        leases.append(await claim_one(queue))
        await settle(queue, leases[-1], step)
    if not steps:
        leases.append(await claim_one(queue))
    told = await inbox.ledger.events(job_id)
    noted = [event for event in await inbox.journal.read() if event.job_id == job_id]
    assert [event.ts_ms for event in told] == [event.ts_ms for event in noted]
    assert [int(event.event_id) for event in told] == [event.ver for event in noted]
    assert [event.type for event in noted].count("claim") == len(leases)


@pytest.mark.clause("I-42")
async def test_sealed_credentials_change_under_the_lease_and_by_version_only(
    inbox: InboxStage,
) -> None:
    from tenure.contracts.inbox import open_parts
    from tenure.core.registry import parse_url

    queue = inbox.queue("w1")
    sealed = {
        "credential_version": 1,
        "storage_creds_encrypted": b"\x00secret",
        "storage_creds_dek_wrapped": b"\xffkey",
        "storage_creds_kek_id": "kek-a",
        "storage_creds_encryption_version": 1,
    }
    await submit(queue, job("sealed", max_attempts=5, requester="anna", options=sealed))
    stale = await claim_one(queue)
    columns = SealedColumns(open_parts(parse_url(inbox.url))[0], INBOX)
    try:
        row = await columns.read(stale)
        assert bytes(row["storage_creds_encrypted"]) == b"\x00secret"
        assert (row["requester_id"], row["credential_version"]) == ("anna", 1)
        assert await columns.replace(stale, 1, (b"new", b"key2", "kek-a", 1))
        assert not await columns.replace(stale, 1, (b"late", b"key3", "kek-a", 1))
        assert [await columns.count_refresh(stale) for _ in range(2)] == [1, 2]
        assert not await columns.put("sealed", "bert", 2, (b"no", b"no", "kek-a", 1))
        assert await columns.put("sealed", "anna", 2, (b"newer", b"key4", "kek-a", 1))
        (page,) = [
            row  # whoever rotates a key goes through all queues, so those of other tests too
            for row in await columns.page(not_under="kek-b", after="", limit=1_000)
            if row["job_id"] == "sealed"
        ]
        swap = ("sealed", 3, "kek-a", bytes(page["storage_creds_dek_wrapped"]), "kek-b", b"key5")
        assert (await columns.swap([swap]), await columns.swap([swap])) == (1, 0)
        assert (await columns.counts())["kek-b"] == 1
        assert bytes((await columns.read(stale))["storage_creds_encrypted"]) == b"newer"
        await run_out(inbox)
        current = await claim_one(queue)
        for call in (columns.read(stale), columns.count_refresh(stale)):
            with pytest.raises(LeaseLost):
                await call
        with pytest.raises(LeaseLost):
            await columns.replace(stale, 3, (b"x", b"y", "kek-b", 1))
        stored = await record(inbox, "sealed")
        assert (stored.attempt, stored.extra["credential_refresh_count"]) == (2, 2)
        await settle(queue, current, "complete")
    finally:
        await inbox.ledger.remove(["sealed"])
        await columns.close()


@pytest.mark.clause("I-39")
async def test_refreshes_and_deliveries_cost_a_job_no_attempt(inbox: InboxStage) -> None:
    from tenure.contracts.inbox import open_parts
    from tenure.core.registry import parse_url

    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=2))
    lease = await claim_one(queue)
    columns = SealedColumns(open_parts(parse_url(inbox.url))[0], INBOX)
    for _ in range(5):
        await columns.count_refresh(lease)
    await columns.close()
    stored = await record(inbox, job_id)
    assert (stored.attempt, stored.extra["credential_refresh_count"]) == (1, 5)


@pytest.mark.clause("I-6")
async def test_a_refusal_of_the_database_reaches_the_caller_as_an_error(inbox: InboxStage) -> None:
    """Nothing of ours asks for it; if it did, it would hear so and not go on in silence."""
    from tenure.contracts.inbox import open_parts
    from tenure.core.registry import parse_url

    engine, _ = open_parts(parse_url(inbox.url))
    queue = inbox.queue("w1")
    await submit(queue, job("twice"))
    try:
        with pytest.raises(ServerError):
            await engine.run(INBOX, "ticket_add", ticket_h=None, caller=None, ttl_ms=1)
        assert isinstance(await claim_one(queue), Lease)
        assert await state(inbox, "twice") == "claimed"
    finally:
        await engine.close()


@pytest.mark.clause("I-32")
@pytest.mark.raw_writes
async def test_the_history_can_be_entered_by_time(inbox: InboxStage, sql: RawSql) -> None:
    queue = inbox.queue("w1")
    await submit(queue, *[job(f"old-{n}") for n in range(20)])
    await sql("UPDATE job_journal SET ts_ms = ts_ms - 3600000")
    await submit(queue, *[job(f"new-{n}") for n in range(10)])
    (now_ms,) = (await sql("SELECT max(ts_ms) FROM job_journal"))[0]
    journal = open_journal(inbox.url)
    try:
        fresh = await journal.wait(after=journal.since(now_ms - 60_000), wait_ms=0)
        assert [event.job_id for event in fresh] == [f"new-{n}" for n in range(10)]
        assert len(await journal.read(after=journal.since(now_ms - 7_200_000))) == 30
        assert await journal.read(after=journal.since(now_ms + 60_000)) == []
        assert await journal.read(after=fresh[0].seq) == fresh[1:]
    finally:
        await journal.close()


@pytest.mark.clause("I-40")
async def test_the_doctor_finds_nothing_wrong_with_a_store_that_runs(inbox: InboxStage) -> None:
    await submit(inbox.queue(), job())
    store = parse_url(inbox.url).store
    on_server = store.startswith("postgres")
    found = await postgres_findings(store) if on_server else sqlite_findings(store)
    assert {finding.check for finding in found} >= (
        {"postgres version", "fsync", "role", "clock"} if on_server else {"folder", "database file"}
    )
    # A server of the tests may run without fsync, which is for the doctor to say.
    assert not [f for f in found if f.level == "problem" and f.check != "fsync"]
