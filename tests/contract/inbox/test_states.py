"""The transition table: as data, through the queue, and in the database against every writer."""

import itertools
import sqlite3
from typing import Any

import asyncpg
import pytest

from tenure.contracts.inbox import MACHINE as INBOX
from tenure.contracts.inbox import open_parts
from tenure.contracts.inbox.queue import InboxQueue
from tenure.contracts.inbox.transcode_request import view
from tenure.core.errors import InvalidTransition, StoreUnreachable, UsageError
from tenure.core.lease import Report
from tenure.core.outcome import BURIED, Retried
from tenure.core.registry import parse_url
from tenure.sql.engine import Engine
from tests.contract.inbox.conftest import RawSql
from tests.contract.inbox_stage import InboxStage
from tests.contract.suite.acting import claim_one, job, record, settle, state, submit

REFUSED = (sqlite3.IntegrityError, asyncpg.CheckViolationError)
PAIRS = [pair for pair in itertools.product(INBOX.states, repeat=2) if pair[0] != pair[1]]
TABLE = {
    *(("queued", "claimed"), ("claimed", "fetching"), ("fetching", "processing")),
    *(("processing", "uploading"), ("uploading", "succeeded")),
    *((running, to) for running in INBOX.running for to in ("queued", "failed")),
    *(("failed", "queued"), ("failed", "dead_letter")),
}
# The steps by which a raw writer brings a fresh job into each state.
WAY = {
    "queued": (),
    "claimed": ("claimed",),
    "fetching": ("claimed", "fetching"),
    "processing": ("claimed", "fetching", "processing"),
    "uploading": ("claimed", "fetching", "processing", "uploading"),
    "succeeded": ("claimed", "fetching", "processing", "uploading", "succeeded"),
    "failed": ("claimed", "failed"),
    "dead_letter": ("claimed", "failed", "dead_letter"),
}


async def step(sql: RawSql, job_id: str, to: str) -> None:
    """A raw step with all that belongs to it but the permission."""
    leased = 9_999_999_999_999 if to in INBOX.running else 0
    ready = "1 = 1" if to == "queued" else "1 = 0"
    raised = 1 if to == "claimed" else 0
    await sql(
        f"UPDATE inbox_jobs SET status = ?, ready = ({ready}), lease_expires_at = ?, "
        f"claim_version = claim_version + {raised} WHERE job_id = ?",
        *(to, leased, job_id),
    )


@pytest.mark.clause("I-6")
def test_the_table_is_the_contracts_and_every_other_pair_is_refused() -> None:
    assert len(PAIRS) == 56
    assert {pair for pair in PAIRS if INBOX.allows(*pair)} == TABLE
    for pair in PAIRS:
        if pair not in TABLE:
            with pytest.raises(InvalidTransition):
                INBOX.require(*pair)
    for path in INBOX.combined_steps:
        assert all(hop in TABLE for hop in itertools.pairwise(path)), path


@pytest.mark.raw_writes
@pytest.mark.clause("I-6")
@pytest.mark.parametrize("pair", PAIRS, ids=">".join)
async def test_raw_sql_makes_the_steps_of_the_table_and_no_other(
    inbox: InboxStage, sql: RawSql, pair: tuple[str, str]
) -> None:
    queue = inbox.queue()
    here, there = pair
    (job_id,) = await submit(queue, job(f"raw-{here}-{there}", max_attempts=3))
    for state_ in WAY[here]:
        await step(sql, job_id, state_)
    if pair in TABLE:
        await step(sql, job_id, there)
        assert await state(inbox, job_id) == there
    else:
        with pytest.raises(REFUSED, match=r"step|transition"):
            await step(sql, job_id, there)
        assert await state(inbox, job_id) == here


@pytest.mark.raw_writes
@pytest.mark.clause("I-6")
async def test_raw_sql_can_neither_begin_elsewhere_nor_move_the_claim_version(
    inbox: InboxStage, sql: RawSql
) -> None:
    (job_id,) = await submit(inbox.queue(), job("raw-fence", max_attempts=1))
    claims = "UPDATE inbox_jobs SET status = 'claimed', ready = (1 = 0), lease_expires_at = 9"
    buries = "UPDATE inbox_jobs SET status = 'dead_letter', passed = 'failed>', ready = (1 = 0)"
    columns = "job_id, queue, task, max_attempts, created_ms, updated_ms, payload, status, ready"
    values = "?, 'q', 'x', 1, 1, 1, '{}', 'failed', (1 = 0)"
    for statement in (
        "UPDATE inbox_jobs SET claim_version = claim_version + 1 WHERE job_id = ?",
        "UPDATE inbox_jobs SET claim_version = claim_version - 1 WHERE job_id = ?",
        f"{claims} WHERE job_id = ?",
        f"{claims}, claim_version = 7 WHERE job_id = ?",
        f"{buries} WHERE job_id = ?",
        f"INSERT INTO inbox_jobs ({columns}) VALUES ({values})",
    ):
        value = "another" if statement.startswith("INSERT") else job_id
        with pytest.raises(REFUSED):
            await sql(statement, value)
    assert await state(inbox, job_id) == "queued"


@pytest.mark.raw_writes
@pytest.mark.clause("I-6")
async def test_a_failed_job_without_attempts_left_cannot_go_back(
    inbox: InboxStage, sql: RawSql
) -> None:
    queue = inbox.queue()
    (job_id,) = await submit(queue, job("raw-spent", max_attempts=1))
    await step(sql, job_id, "claimed")
    await sql("UPDATE inbox_jobs SET attempt_count = 1 WHERE job_id = ?", job_id)
    await step(sql, job_id, "failed")
    with pytest.raises(REFUSED):
        await step(sql, job_id, "queued")
    assert (await queue.upkeep()).buried == 1
    assert await state(inbox, job_id) == "dead_letter"


@pytest.mark.raw_writes
@pytest.mark.clause("I-6")
async def test_a_job_that_another_writer_left_in_failed_is_decided_by_upkeep(
    inbox: InboxStage, sql: RawSql
) -> None:
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, job("raw-failed", max_attempts=3))
    await step(sql, job_id, "claimed")
    await step(sql, job_id, "failed")
    await queue.upkeep()
    assert (await claim_one(queue)).job_id == job_id


@pytest.mark.clause("I-5")
async def test_a_handler_leads_its_job_through_the_stages(inbox: InboxStage) -> None:
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, job())
    lease = await claim_one(queue)
    for stage in ("fetching", "processing", "uploading"):
        assert await queue.report([Report(lease=lease, type="stage", step=stage)]) == [None]
        assert await state(inbox, job_id) == stage
    await settle(queue, lease, "complete")
    events = [event for event in await inbox.journal.read() if event.job_id == job_id]
    steps = [(event.from_state, event.to_state) for event in events]
    assert steps == [
        *(("", "queued"), ("queued", "claimed"), ("claimed", "fetching")),
        *(("fetching", "processing"), ("processing", "uploading"), ("uploading", "succeeded")),
    ]


@pytest.mark.clause("I-5")
@pytest.mark.parametrize("here", INBOX.running)
@pytest.mark.parametrize("there", ["fetching", "processing", "uploading"])
async def test_stages_go_forwards_only(inbox: InboxStage, here: str, there: str) -> None:
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, job())
    lease = await claim_one(queue)
    if here != "claimed":
        await queue.report([Report(lease=lease, type="stage", step=here)])
    order = list(INBOX.running)
    report = Report(lease=lease, type="stage", step=there, progress=b"1")
    if order.index(there) >= order.index(here):
        assert await queue.report([report]) == [None]
        assert await state(inbox, job_id) == there
    else:
        with pytest.raises(InvalidTransition, match=f"from {here} to {there}"):
            await queue.report([report])
        stored = await record(inbox, job_id)
        assert (stored.state, stored.progress) == (here, b"")


@pytest.mark.clause("I-5")
async def test_there_are_no_other_stages_and_no_reported_ends(inbox: InboxStage) -> None:
    queue = inbox.queue("w1")
    await submit(queue, job())
    lease = await claim_one(queue)
    with pytest.raises(UsageError, match="the stages are"):
        await queue.report([Report(lease=lease, type="stage", step="succeeded")])
    with pytest.raises(UsageError, match="return or raise"):
        await queue.report([Report(lease=lease, type="dead_letter")])


@pytest.mark.clause("I-6")
@pytest.mark.parametrize("at", ["", "fetching", "processing", "uploading"])
@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("complete", "succeeded"),
        ("bury", "dead_letter"),
        ("retry", "queued"),
        ("release", "queued"),
    ],
)
async def test_every_outcome_is_a_walk_of_the_table_from_every_stage(
    inbox: InboxStage, sql: RawSql, at: str, kind: str, end: str
) -> None:
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=3))
    lease = await claim_one(queue)
    if at:
        await queue.report([Report(lease=lease, type="stage", step=at)])
    await settle(queue, lease, kind)  # type: ignore[arg-type]
    ((left, passed),) = await sql("SELECT status, passed FROM inbox_jobs WHERE job_id = ?", job_id)
    assert left == end
    steps = await steps_of(inbox, job_id)
    walk = [at or "claimed"]
    for step_ in steps[steps.index(at or "claimed") + 1 :]:
        walk += [*passed.split(">")[:-1], step_]
    assert all(hop in TABLE for hop in itertools.pairwise(walk)), walk


async def steps_of(inbox: InboxStage, job_id: str) -> list[str]:
    """The states that the journal tells of, in their order."""
    events = [event for event in await inbox.journal.read() if event.job_id == job_id]
    assert [event.ver for event in events] == list(range(1, len(events) + 1))
    return [event.to_state for event in events]


@pytest.mark.clause("I-6")
@pytest.mark.parametrize(
    ("kind", "attempts", "then"), [("fail", 3, "queued"), ("fail", 1, "dead_letter")]
)
async def test_a_failure_leads_through_failed_by_a_step_of_its_own(
    inbox: InboxStage, kind: str, attempts: int, then: str
) -> None:
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=attempts))
    await settle(queue, await claim_one(queue), kind)  # type: ignore[arg-type]
    assert await steps_of(inbox, job_id) == ["queued", "claimed", "failed", then]
    assert await state(inbox, job_id) == then


@pytest.mark.clause("I-6", "I-26")
async def test_what_is_cancelled_while_it_waits_fails_before_it_is_a_dead_letter(
    inbox: InboxStage,
) -> None:
    (job_id,) = await submit(inbox.queue("w1"), job())
    assert await inbox.ledger.cancel([job_id]) == ["ok"]
    assert await steps_of(inbox, job_id) == ["queued", "failed", "dead_letter"]


class CutOff:
    """The engine of a worker that loses its store between a failure and the decision about it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def run(self, table: str, operation: str, *batch: Any, **params: Any) -> Any:
        if operation == "decide":
            raise StoreUnreachable("the store is away")
        return await self._engine.run(table, operation, *batch, **params)


@pytest.mark.clause("I-6", "I-20")
@pytest.mark.parametrize(("attempts", "then"), [(3, "queued"), (1, "dead_letter")])
async def test_a_reader_sees_the_failed_state_and_another_worker_leads_on(
    inbox: InboxStage, attempts: int, then: str
) -> None:
    engine, options = open_parts(parse_url(inbox.url))
    cut = InboxQueue(CutOff(engine), options, worker_id="w1")
    (job_id,) = await submit(cut, job(max_attempts=attempts))
    lease = await claim_one(cut)
    try:
        with pytest.raises(StoreUnreachable):
            await settle(cut, lease, "fail")
        seen = view(await record(inbox, job_id))
        assert (seen.status, seen.due_ms >= 0) == ("failed", True)
        assert b"it broke" in bytes(seen.error)  # type: ignore[arg-type]
        await inbox.queue("w2").upkeep()
        assert await state(inbox, job_id) == then
        # The same outcome sent again is answered with its verdict and changes nothing.
        answer = await settle(inbox.queue("w1"), lease, "fail")
        assert isinstance(answer, Retried if then == "queued" else type(BURIED))
        assert await state(inbox, job_id) == then
    finally:
        await cut.close()


@pytest.mark.raw_writes
@pytest.mark.clause("I-6")
async def test_one_write_cannot_go_through_failed_to_a_dead_letter(
    inbox: InboxStage, sql: RawSql
) -> None:
    (job_id,) = await submit(inbox.queue(), job("raw-jump", max_attempts=1))
    jump = "UPDATE inbox_jobs SET status = 'dead_letter', ready = (1 = 0), lease_expires_at = 0"
    for passed in ("claimed>failed>", "failed>"):
        with pytest.raises(REFUSED):
            await sql(f"{jump}, passed = '{passed}' WHERE job_id = ?", job_id)
        if passed != "failed>":
            await step(sql, job_id, "claimed")
    assert await state(inbox, job_id) == "claimed"
