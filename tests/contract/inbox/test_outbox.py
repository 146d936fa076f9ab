"""The outbox: each transition tells, in its own transaction; events of a job keep their order."""

import asyncio
import itertools
import secrets
import sqlite3
import time
from typing import Any

import asyncpg
import msgspec
import pytest

from tenure.contracts.inbox import open_parts
from tenure.contracts.inbox.queue import OutboxQueue
from tenure.core.errors import UsageError
from tenure.core.job import NewJob
from tenure.core.lease import Report
from tenure.core.outcome import BURIED, COMPLETED, Failure, OutcomeKind, Retried
from tenure.core.registry import open_queue, parse_url
from tenure.core.seam import Query
from tenure.sql import claim as sql_claim
from tenure.sql import sql_ledger
from tenure.sql.engine import Engine
from tenure.webhooks.signing import WebhookEvent
from tests.chaos.verdict import check
from tests.contract.adapters import Servers
from tests.contract.inbox.conftest import Outbox, RawSql
from tests.contract.inbox_stage import InboxStage, migrated
from tests.contract.suite.acting import (
    claim,
    claim_one,
    job,
    nothing_to_claim,
    run_out,
    settle,
    submit,
)
from tests.waiting import until

HOOK = "https://requester.example/hooks"


def told(job_id: str = "", **fields: object) -> NewJob:
    """A job whose requester wants to be told."""
    return job(job_id, options={"status_webhook_url": HOOK}, **fields)


@pytest.mark.clause("I-36", "I-37")
async def test_each_transition_of_a_job_leaves_its_event(inbox: InboxStage, outbox: Outbox) -> None:
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, told(max_attempts=3))
    lease = await claim_one(queue)
    await queue.report([Report(lease=lease, type="stage", step="fetching", progress=b"10")])
    await settle(queue, lease, "retry", failure=Failure(code="http_503", message="busy"))
    await settle(queue, await claim_one(queue), "complete", result=b'{"files":["a.mp4"]}')
    bodies = [msgspec.json.decode(row.payload) for row in await outbox.rows()]
    assert [body["status"] for body in bodies] == [
        *("claimed", "fetching", "failed", "queued", "claimed", "succeeded")
    ]
    assert [body["seq"] for body in bodies] == [1, 2, 3, 4, 5, 6]
    assert [body["event_id"] for body in bodies] == [f"{job_id}.{n}" for n in range(1, 7)]
    assert [row.job_id for row in await outbox.rows()] == [f"{job_id}.{n}" for n in range(1, 7)]
    assert bodies[2]["error"]["code"] == "http_503"
    assert {body["job_id"] for body in bodies} == {job_id}
    assert bodies[1]["progress"] == 10
    assert bodies[-1]["outputs"] == {"files": ["a.mp4"]}
    assert all("outputs" not in body for body in bodies[:-1])
    rows = await outbox.rows()
    assert {row.extra["status_webhook_url"] for row in rows} == {HOOK}


@pytest.mark.clause("I-36")
async def test_whoever_waits_for_events_is_woken_by_the_steps_that_tell_of_them(
    servers: Servers,
) -> None:
    """On PostgreSQL the notice follows its step: within, steps would commit one after the other."""
    schema = f"woken{secrets.token_hex(4)}"
    await migrated(servers.postgres(), schema)
    heard: asyncio.Queue[str] = asyncio.Queue()
    listener = await asyncpg.connect(servers.postgres())
    await listener.add_listener(f"{schema}_jobs", lambda *told: heard.put_nowait(str(told[-1])))
    queue = open_queue(f"inbox+{servers.postgres()}?schema={schema}", worker_id="w")
    try:
        await submit(queue, told(), job())
        async with asyncio.timeout(10):
            assert await heard.get() == "inbox"
            leases = await claim(queue, 2)
            assert await heard.get() == "inbox/outbox"
            await settle(queue, leases[1], "complete")  # tells nobody
            await settle(queue, leases[0], "complete")
            assert await heard.get() == "inbox/outbox"
        await submit(queue, told())
        await claim_one(queue)
        await queue.close()  # not before what is due has gone out
        async with asyncio.timeout(10):
            assert [await heard.get(), await heard.get()] == ["inbox", "inbox/outbox"]
        assert heard.empty()
    finally:
        await queue.close()
        await listener.execute(f"DROP SCHEMA {schema} CASCADE")
        await listener.close()


@pytest.mark.clause("I-12", "I-22")
@pytest.mark.options(lease_ms=30_000)
@pytest.mark.parametrize("ended", ["complete", "bury"])
async def test_the_end_of_an_event_wakes_who_waits_for_the_next_one(
    inbox: InboxStage, outbox: Outbox, monkeypatch: pytest.MonkeyPatch, ended: OutcomeKind
) -> None:
    monkeypatch.setattr(sql_claim, "POLL_MS", (30_000, 30_000))
    queue, other = inbox.queue("w1"), Outbox(inbox)
    try:
        await submit(queue, told())
        await settle(queue, await claim_one(queue), "complete")
        first = await claim_one(outbox.queue)
        waiting = asyncio.create_task(other.queue.claim(1, wait_ms=20_000))
        await asyncio.sleep(0.2)  # it has to be asleep: the promise is about waking up
        await settle(outbox.queue, first, ended)
        async with asyncio.timeout(10):
            (second,) = await waiting
        assert (second.gid, second.job_id) == (first.gid, f"{first.gid}.2")
    finally:
        await other.close()


@pytest.mark.clause("I-37")
async def test_a_job_that_is_given_up_tells_its_error_without_the_stack(
    inbox: InboxStage, outbox: Outbox
) -> None:
    queue = inbox.queue("w1")
    await submit(queue, told())
    failure = Failure(code="http_404", message='no "source"', stack="secret frame", retryable=False)
    assert await settle(queue, await claim_one(queue), "bury", failure=failure) == BURIED
    last = (await outbox.rows())[-1]
    body = msgspec.json.decode(last.payload)
    assert body["status"] == "dead_letter"
    assert body["error"] == {"code": "http_404", "message": 'no "source"', "retryable": False}
    assert b"secret frame" not in last.payload


@pytest.mark.clause("I-36")
async def test_a_job_without_a_webhook_leaves_no_event(inbox: InboxStage, outbox: Outbox) -> None:
    queue = inbox.queue("w1")
    await submit(queue, job())
    await settle(queue, await claim_one(queue), "complete")
    assert await outbox.rows() == []


@pytest.mark.raw_writes
@pytest.mark.clause("I-36")
async def test_no_transition_is_kept_whose_event_cannot_be(
    inbox: InboxStage, sql: RawSql, outbox: Outbox
) -> None:
    """Also a raw writer's transition tells; and where the event cannot be written, nothing is."""
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, told("atomic"))
    claims = (
        "UPDATE inbox_jobs SET status = 'claimed', ready = (1 = 0), lease_expires_at = 9, "
        "claim_version = claim_version + 1 WHERE job_id = ?"
    )
    await sql(
        "INSERT INTO job_outbox_events (job_id, queue, task, max_attempts, created_ms, updated_ms,"
        " payload) VALUES ('atomic.1', 'elsewhere', 'x', 1, 1, 1, '{}')"
    )
    with pytest.raises((sqlite3.IntegrityError, asyncpg.UniqueViolationError)):
        await sql(claims, job_id)
    stored = await inbox.ledger.get(job_id)
    assert stored is not None
    assert (stored.state, stored.fence) == ("queued", 0)
    await sql("DELETE FROM job_outbox_events WHERE job_id = 'atomic.1'")
    await sql(claims, job_id)
    assert [row.job_id for row in await outbox.rows()] == ["atomic.1"]


@pytest.mark.clause("I-22")
async def test_events_of_a_job_are_handed_out_one_after_the_other(
    inbox: InboxStage, outbox: Outbox
) -> None:
    queue = inbox.queue("w1")
    first, second = await submit(queue, told("o1"), told("o2"))
    for lease in await claim(queue, 2):
        await settle(queue, lease, "complete")
    order: list[str] = []
    for _ in range(2):
        leases = await claim(outbox.queue, 2)
        assert await nothing_to_claim(outbox.queue)
        order += [lease.job_id for lease in leases]
        for lease in leases:
            assert await settle(outbox.queue, lease, "complete") == COMPLETED
    assert order == [f"{first}.1", f"{second}.1", f"{first}.2", f"{second}.2"]


@pytest.mark.clause("I-22", "I-39")
async def test_an_event_that_waits_for_its_retry_holds_back_the_later_ones_of_its_job_only(
    inbox: InboxStage, outbox: Outbox
) -> None:
    queue = inbox.queue("w1")
    slow, quick = await submit(queue, told("slow"), told("quick"))
    for lease in await claim(queue, 2):
        await settle(queue, lease, "complete")
    stuck, fine = await claim(outbox.queue, 2)
    delay_ms = inbox.lease_ms
    verdict = await settle(outbox.queue, stuck, "retry", delay_ms=delay_ms)
    assert isinstance(verdict, Retried)
    await settle(outbox.queue, fine, "complete")
    (after,) = await outbox.queue.claim(10, wait_ms=0)
    assert after.job_id == f"{quick}.2"
    await inbox.advance(delay_ms)
    again = await claim_one(outbox.queue)
    assert (again.job_id, again.attempt) == (f"{slow}.1", 2)
    jobs = await inbox.ledger.get(slow)
    assert jobs is not None
    assert jobs.attempt == 1  # deliveries are counted with the event, not with the job


@pytest.mark.clause("I-22", "I-38")
async def test_an_event_that_is_given_up_lets_the_next_one_go_and_can_be_sent_again(
    inbox: InboxStage, outbox: Outbox
) -> None:
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, told("gone"))
    await settle(queue, await claim_one(queue), "complete")
    assert await settle(outbox.queue, await claim_one(outbox.queue), "bury") == BURIED
    dead = (await outbox.ledger.find(Query(states=("dead_letter",)))).jobs
    assert [row.job_id for row in dead] == [f"{job_id}.1"]
    await settle(outbox.queue, await claim_one(outbox.queue), "complete")
    assert await outbox.ledger.retry([f"{job_id}.1"]) == ["ok"]
    again = await claim_one(outbox.queue)
    assert (again.job_id, again.attempt, again.fence) == (f"{job_id}.1", 1, 2)
    await settle(outbox.queue, again, "complete")


@pytest.mark.clause("I-36")
async def test_a_stale_worker_leaves_no_event(inbox: InboxStage, outbox: Outbox) -> None:
    queue = inbox.queue("pod-0")
    await submit(queue, told("fenced", max_attempts=5))
    stale = await claim_one(queue)
    await run_out(inbox)
    current = await claim_one(queue)
    before = await outbox.rows()
    await queue.report([Report(lease=stale, type="stage", step="fetching")])
    await settle(queue, stale, "complete")
    assert await outbox.rows() == before
    await settle(queue, current, "complete")
    statuses = [msgspec.json.decode(row.payload)["status"] for row in await outbox.rows()]
    assert statuses == ["claimed", "queued", "claimed", "succeeded"]


@pytest.mark.clause("I-38")
async def test_a_claim_of_events_is_small_whatever_is_asked(
    inbox: InboxStage, outbox: Outbox
) -> None:
    queue = inbox.queue("w1")
    await submit(queue, *[told(f"many-{n}") for n in range(50)])
    await claim(queue, 50)
    assert len(await outbox.queue.claim(100, wait_ms=0)) == 10
    large = open_queue(f"{inbox.url}&box=outbox&batch=25", worker_id="w2")
    assert len(await large.claim(100, wait_ms=0)) == 25
    await large.close()
    for batch in (0, 26):
        with pytest.raises(UsageError, match="1 to 25"):
            open_queue(f"{inbox.url}&box=outbox&batch={batch}")


@pytest.mark.few
@pytest.mark.clause("I-12")
@pytest.mark.options(lease_ms=30_000)
async def test_an_idle_outbox_is_polled_with_jitter_and_woken_on_top(
    inbox: InboxStage, outbox: Outbox
) -> None:
    engine, options = open_parts(parse_url(f"{inbox.url}&box=outbox"))
    looks = Looks(engine)
    idle = OutboxQueue(looks, options, worker_id="w2")
    assert await idle.claim(1, wait_ms=5_000) == []
    pauses = [after - before for before, after in itertools.pairwise(looks.at_s[1:-1])]
    assert len(pauses) >= 2
    assert all(0.45 < pause < 1.9 for pause in pauses), pauses
    waiting = asyncio.create_task(idle.claim(1, wait_ms=10_000))
    await until(lambda: len(looks.at_s) > 4, "it waits")
    queue = inbox.queue("w1")
    await submit(queue, told("rings"))
    began_s = time.monotonic()
    await claim_one(queue)
    (event,) = await waiting
    assert (event.job_id, time.monotonic() - began_s < 0.45) == ("rings.1", True)
    await idle.close()


class Looks:
    """Notes when a claimer asks its database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.at_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def run(self, table: str, operation: str, *batch: Any, **params: Any) -> Any:
        if operation == "claim":
            self.at_s.append(time.monotonic())
        return await self._engine.run(table, operation, *batch, **params)


@pytest.mark.clause("I-22", "I-36")
@pytest.mark.options(lease_ms=10_000)
async def test_four_deliverers_keep_the_order_of_every_job(
    inbox: InboxStage, outbox: Outbox
) -> None:
    queue = inbox.queue("w1")
    ids = await submit(queue, *[told(f"lots-{n}") for n in range(40)])
    sent: list[tuple[str, int]] = []
    deliverers = [Outbox(inbox) for _ in range(4)]

    async def work() -> None:
        left = len(ids)
        while left:
            leases = await queue.claim(7, wait_ms=50)
            await queue.report(
                [Report(lease=lease, type="stage", step="processing") for lease in leases]
            )
            for lease in leases:
                await settle(queue, lease, "complete")
            left -= len(leases)

    async def deliver(box: Outbox) -> None:
        while len(sent) < 3 * len(ids):
            for lease in await box.queue.claim(10, wait_ms=50):
                body = msgspec.json.decode(lease.payload)
                sent.append((body["job_id"], body["seq"]))
                await settle(box.queue, lease, "complete")

    await asyncio.wait_for(asyncio.gather(work(), *map(deliver, deliverers)), 60)
    for box in deliverers:
        await box.close()
    for job_id in ids:
        assert [seq for told_of, seq in sent if told_of == job_id] == [1, 2, 3]


@pytest.mark.clause("I-32", "I-36")
async def test_the_outbox_has_a_history_of_its_own_that_holds(
    inbox: InboxStage, outbox: Outbox
) -> None:
    queue = inbox.queue("w1")
    await submit(queue, told("h1"))
    await settle(queue, await claim_one(queue), "complete")
    await settle(outbox.queue, await claim_one(outbox.queue), "retry")
    for _ in range(2):
        await settle(outbox.queue, await claim_one(outbox.queue), "complete")
    events = await outbox.history()
    verdict = check(events)
    assert verdict.ok, str(verdict)
    assert [event.type for event in events if event.job_id == "h1.1"] == [
        *("submit", "claim", "retry", "promote", "claim", "complete")
    ]


@pytest.mark.clause("I-31", "I-36")
async def test_the_history_of_one_event_begins_with_the_step_it_tells_of(
    inbox: InboxStage, outbox: Outbox
) -> None:
    queue = inbox.queue("w1")
    await submit(queue, told("one.by.one"))
    await settle(queue, await claim_one(queue), "complete")
    await settle(outbox.queue, await claim_one(outbox.queue), "complete")
    first = await outbox.ledger.events("one.by.one.1")
    assert [event.type for event in first] == ["queued", "claimed", "succeeded"]
    assert [event.type for event in await outbox.ledger.events("one.by.one.2")] == ["queued"]
    assert await outbox.ledger.events("one.by.one.3") == []
    assert await outbox.ledger.events("one.by.one.1", after="2") == first[2:]


@pytest.mark.clause("I-30", "I-32")
async def test_events_are_found_among_many_steps_that_told_of_none(
    inbox: InboxStage, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listed and read in short spans, most of which hold none; and not the same spans twice."""
    monkeypatch.setattr(sql_ledger, "SPAN", 3)
    queue = inbox.queue("w1")
    for name in ("first", "second"):
        await submit(queue, told(name))
        await settle(queue, await claim_one(queue), "complete")
        for _ in range(5):
            await submit(queue, job())
            await settle(queue, await claim_one(queue), "complete")
    ids = ["first.1", "first.2", "second.1", "second.2"]
    assert [row.job_id for row in await outbox.rows()] == ids
    events = await outbox.journal.read()
    assert [event.job_id for event in events] == ids
    assert await outbox.journal.read(limit=3) == events[:3]
    assert await outbox.journal.read(after=events[-1].seq) == []
    await submit(queue, told("third"))
    await claim_one(queue)
    (last,) = await outbox.journal.read(after=events[-1].seq)
    assert last.job_id == "third.1"


@pytest.mark.clause("I-37")
@pytest.mark.parametrize("task", ['say "it"', "back\\slash", "plain", "Grüße"])
async def test_an_event_is_json_whatever_the_task_is_called(
    inbox: InboxStage, outbox: Outbox, task: str
) -> None:
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, told(task=task))
    await claim_one(queue)
    (row,) = await outbox.rows()
    body = msgspec.json.decode(row.payload)
    assert (body["task"], body["job_id"], body["event_id"]) == (task, job_id, f"{job_id}.1")


@pytest.mark.clause("I-22", "I-28")
async def test_an_event_that_was_removed_lets_the_next_ones_go(
    inbox: InboxStage, outbox: Outbox
) -> None:
    queue = inbox.queue("w1")
    await submit(queue, told("gap"))
    lease = await claim_one(queue)
    await queue.report([Report(lease=lease, type="stage", step="processing")])
    await settle(queue, lease, "complete")
    assert await outbox.ledger.remove(["gap.2"]) == ["ok"]
    first = await claim_one(outbox.queue)
    await settle(outbox.queue, first, "complete")
    await outbox.queue.upkeep()
    assert (await claim_one(outbox.queue)).job_id == "gap.3"


@pytest.mark.raw_writes
@pytest.mark.clause("I-24", "I-36")
async def test_a_trimmed_journal_still_lists_the_events_that_are_there(
    inbox: InboxStage, outbox: Outbox
) -> None:
    queue = inbox.queue("w1")
    await submit(queue, told("kept"))
    await settle(queue, await claim_one(queue), "complete")
    forgetful = open_queue(f"{inbox.url}&journal_days=0.0000001", worker_id="w2")
    await inbox.advance(20)
    await forgetful.upkeep()
    assert [row.job_id for row in await outbox.rows()] == ["kept.1", "kept.2"]
    assert await outbox.ledger.remove(["kept.1", "kept.2"]) == ["ok", "ok"]
    await forgetful.close()
    forgetful = open_queue(f"{inbox.url}&journal_days=0.0000001", worker_id="w3")
    assert (await forgetful.upkeep()).trimmed == 2
    await forgetful.close()


@pytest.mark.clause("I-36")
async def test_every_event_has_the_shape_that_receivers_are_told(
    inbox: InboxStage, outbox: Outbox
) -> None:
    queue = inbox.queue("w1")
    await submit(queue, told(max_attempts=2), told(max_attempts=1))
    good, bad = await claim(queue, 2)
    await queue.report([Report(lease=good, type="stage", step="fetching", progress=b"10")])
    await settle(queue, good, "complete", result=b'{"files":[]}')
    await settle(queue, bad, "bury", failure=Failure(code="gone", message="no such file"))
    rows = await outbox.rows()
    shapes = [msgspec.json.decode(row.payload, type=WebhookEvent) for row in rows]
    assert {shape.status for shape in shapes} >= {"succeeded", "dead_letter"}
    known = set(WebhookEvent.__struct_fields__)
    told_of = {name for row in rows for name in msgspec.json.decode(row.payload)}
    assert told_of == known
