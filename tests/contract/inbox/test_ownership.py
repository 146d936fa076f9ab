"""Ownership: what a claim sets, what fences a write, how often a worker may die of one job."""

import asyncio
import random
import uuid

import pytest

from tenure.core.errors import LeaseLost
from tenure.core.outcome import COMPLETED
from tenure.core.registry import open_queue
from tenure.worker.config import identity
from tests.contract.inbox.conftest import RawSql
from tests.contract.inbox_stage import InboxStage
from tests.contract.suite.acting import (
    claim,
    claim_one,
    job,
    nothing_to_claim,
    record,
    run_out,
    settle,
    submit,
)


@pytest.mark.clause("I-8", "I-9")
async def test_a_claim_sets_all_that_the_contract_names(inbox: InboxStage, sql: RawSql) -> None:
    queue = inbox.queue("pod-7")
    (job_id,) = await submit(queue, job(max_attempts=4))
    lease = await claim_one(queue)
    ((worker, status, until, beat, version, attempts, token),) = await sql(
        "SELECT worker_id, status, lease_expires_at, heartbeat_at, claim_version, attempt_count,"
        " lease_token_h FROM inbox_jobs WHERE job_id = ?",
        job_id,
    )
    assert (worker, status, version, attempts) == ("pod-7", "claimed", 1, 1)
    assert until == beat + inbox.lease_ms == lease.lease_until_ms
    assert lease.token not in token  # what proves a lease is kept as a hash


@pytest.mark.clause("I-9", "I-10")
async def test_handing_back_gives_the_attempt_back_and_losing_it_does_not(
    inbox: InboxStage,
) -> None:
    queue = inbox.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=3))
    await settle(queue, await claim_one(queue), "release")
    assert (await record(inbox, job_id)).attempt == 0
    await claim_one(queue)
    await run_out(inbox)
    again = await claim_one(queue)
    stored = await record(inbox, job_id)
    assert (again.attempt, again.fence, stored.extra["lost_count"]) == (2, 3, 1)


@pytest.mark.clause("I-10")
@pytest.mark.options(lost_max=2)
async def test_a_job_that_kills_its_workers_ends_though_attempts_are_left(
    inbox: InboxStage,
) -> None:
    queue = inbox.queue("victim")
    (job_id,) = await submit(queue, job(max_attempts=100))
    for _ in range(2):
        await claim_one(queue)
        await run_out(inbox)
    assert await nothing_to_claim(queue)
    stored = await record(inbox, job_id)
    assert (stored.state, stored.attempt) == ("dead_letter", 2)
    assert b"lease_lost" in stored.error
    attempts = await inbox.ledger.attempts(job_id)  # type: ignore[attr-defined]
    assert [attempt["verdict"] for attempt in attempts] == ["lost", "lost"]


@pytest.mark.clause("I-11")
async def test_a_restarted_pod_of_the_same_name_does_not_own_the_old_lease(
    inbox: InboxStage,
) -> None:
    before, after = inbox.queue("render-0"), inbox.queue("render-0")
    await submit(before, job(max_attempts=5))
    stale = await claim_one(before)
    await run_out(inbox)
    current = await claim_one(after)
    assert isinstance(await settle(before, stale, "complete", result=b'"old"'), LeaseLost)
    assert await settle(after, current, "complete", result=b'"new"') == COMPLETED


@pytest.mark.clause("I-35")
@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"POD_NAME": "render-0", "HOSTNAME": "node7"}, "render-0"),
        ({"HOSTNAME": "node7"}, "node7"),
        ({}, ""),
    ],
)
async def test_a_worker_is_named_exactly_by_its_pod_or_host_or_boot(
    inbox: InboxStage, sql: RawSql, environ: dict[str, str], name: str
) -> None:
    starts = [identity(environ), identity(environ)]
    assert starts[0] != starts[1]  # other contracts need an id that no other process has
    claimed = []
    for worker_id in starts:
        queue = open_queue(inbox.url, worker_id=worker_id)
        (job_id,) = await submit(queue, job())
        await claim_one(queue)
        ((written,),) = await sql("SELECT worker_id FROM inbox_jobs WHERE job_id = ?", job_id)
        claimed.append(written)
        await queue.close()
    if name:
        assert claimed == [name, name]
    else:
        assert claimed == [str(uuid.UUID(each)) for each in claimed]
        assert claimed[0] != claimed[1]


@pytest.mark.clause("I-7", "I-17")
async def test_two_batches_that_overlap_in_any_order_never_deadlock(inbox: InboxStage) -> None:
    queue, other = inbox.queue("w1"), inbox.queue("w2")
    await submit(queue, *[job(max_attempts=9) for _ in range(60)])
    leases = await claim(queue, 60)
    chance = random.Random(7)

    async def churn(holder: object) -> None:
        for _ in range(8):
            part = chance.sample(leases, 50)
            await holder.extend(part)  # type: ignore[attr-defined]

    await asyncio.wait_for(asyncio.gather(*(churn(q) for q in (queue, other, queue, other))), 30)
    from tenure.core.outcome import Outcome

    shuffled = [chance.sample(leases, 60) for _ in range(4)]
    answers = await asyncio.wait_for(
        asyncio.gather(
            *(
                (queue, other)[n % 2].settle([Outcome(lease, "complete") for lease in part])
                for n, part in enumerate(shuffled)
            )
        ),
        30,
    )
    assert all(verdict == COMPLETED for verdicts in answers for verdict in verdicts)


@pytest.mark.clause("I-14")
async def test_three_reapers_take_back_each_lease_once(inbox: InboxStage) -> None:
    queues = [inbox.queue(f"w{n}") for n in range(3)]
    await submit(queues[0], *[job(max_attempts=9) for _ in range(300)])
    await claim(queues[0], 300)
    await run_out(inbox)
    rounds = await asyncio.gather(*(queue.upkeep() for queue in queues for _ in range(2)))
    assert sum(each.reclaimed for each in rounds) == 300
    assert {lease.fence for lease in await claim(queues[1], 300)} == {2}
