"""Upkeep: safe from every worker, and it does what time made due."""

import asyncio

import pytest

from tenure.core.seam import Upkeep
from tests.contract.adapters import Stage
from tests.contract.suite.acting import (
    claim,
    claim_one,
    job,
    ordered,
    run_out,
    settle,
    state,
    submit,
)

pytestmark = pytest.mark.clause("M-23")


async def test_upkeep_of_a_healthy_queue_does_nothing(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id, _) = await submit(queue, job(), job(delay_ms=60_000))
    await claim_one(queue)
    done = await queue.upkeep()
    assert (done.promoted, done.reclaimed, done.buried, done.expired) == (0, 0, 0, 0)
    assert await state(stage, job_id) == stage.words.running


@pytest.mark.leases_run_out
@pytest.mark.clause("M-13")
async def test_upkeep_takes_back_what_ran_out_without_a_claim(stage: Stage) -> None:
    queue = stage.queue("w1")
    ids = await submit(queue, job(max_attempts=3), job(max_attempts=3))
    await claim(queue, 2)
    await run_out(stage)
    done = await queue.upkeep()
    assert (done.reclaimed, done.buried) == (2, 0)
    assert [await state(stage, job_id) for job_id in ids] == [stage.words.waiting] * 2


@pytest.mark.leases_run_out
@pytest.mark.needs("lost_is_attempt")
@pytest.mark.clause("M-13")
async def test_upkeep_buries_what_ran_out_at_its_last_attempt(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=1))
    await claim_one(queue)
    await run_out(stage)
    done = await queue.upkeep()
    assert (done.reclaimed, done.buried) == (1, 1)
    assert await state(stage, job_id) == stage.words.failed


@pytest.mark.leases_run_out
async def test_upkeep_from_many_workers_at_once_does_no_more(stage: Stage) -> None:
    queues = [stage.queue(f"w{n}") for n in range(5)]
    ids = await submit(queues[0], *[job(max_attempts=3) for _ in range(10)])
    await claim(queues[0], 10)
    await run_out(stage)
    rounds = await asyncio.gather(*(queue.upkeep() for queue in queues))
    assert sum(each.reclaimed for each in rounds) == 10
    again = await claim(queues[1], 10)
    assert ordered(stage, [lease.job_id for lease in again]) == ordered(stage, ids)
    assert {lease.fence for lease in again} == {2}


@pytest.mark.leases_run_out
async def test_upkeep_never_takes_a_lease_that_is_kept(stage: Stage) -> None:
    holder, keeper = stage.queue("holder"), stage.queue("other")
    (job_id,) = await submit(holder, job())
    lease = await claim_one(holder)
    for _ in range(3):
        await stage.advance(int(stage.lease_ms * 0.6))
        await holder.extend([lease])
        assert (await keeper.upkeep()).reclaimed == 0
    assert await state(stage, job_id) == stage.words.running


@pytest.mark.needs("retention")
@pytest.mark.options(keep_ms=1_000)
async def test_upkeep_removes_what_finished_long_ago(stage: Stage) -> None:
    queue = stage.queue("w1")
    old, unfinished = await submit(queue, job(), job())
    await settle(queue, await claim_one(queue), "complete")
    await stage.advance(1_001)
    assert await queue.upkeep() == Upkeep(trimmed=1)
    assert await stage.ledger.get(old) is None
    assert await state(stage, unfinished) == stage.words.waiting
    assert (await queue.upkeep()).trimmed == 0
