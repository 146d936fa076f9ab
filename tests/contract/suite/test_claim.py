"""Claim: one lease per job, in order, and it waits well."""

import asyncio
import time

import pytest

from tenure.core.lease import Lease
from tests.contract.adapters import Stage
from tests.contract.suite.acting import claim, claim_one, job, record, settle, submit

pytestmark = pytest.mark.clause("M-7")


async def test_an_empty_queue_gives_nothing(stage: Stage) -> None:
    queue = stage.queue("w1")
    assert await queue.claim(10, wait_ms=0) == []


async def test_a_claim_takes_no_more_than_its_limit(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, *[job() for _ in range(5)])
    assert len(await queue.claim(2, wait_ms=0)) == 2
    assert len(await queue.claim(10, wait_ms=0)) == 3


@pytest.mark.needs("one_order")
async def test_first_attempts_come_in_the_order_of_their_submits(stage: Stage) -> None:
    queue, other = stage.queue("w1"), stage.queue("w2")
    ids = []
    for _ in range(4):
        ids += await submit(queue, *[job() for _ in range(5)])
    claimed = [*await claim(queue, 3), *await claim(other, 10), *await claim(queue, 7)]
    assert [lease.job_id for lease in claimed] == ids


@pytest.mark.needs("priority")
async def test_a_lower_priority_number_is_claimed_first(stage: Stage) -> None:
    queue = stage.queue("w1")
    order = [3, 0, 2, 0, 1]
    await submit(queue, *[job(f"p{n}", priority=number) for n, number in enumerate(order)])
    claimed = await claim(queue, 5)
    assert [lease.job_id for lease in claimed] == ["p1", "p3", "p4", "p2", "p0"]


@pytest.mark.leases_run_out
@pytest.mark.clause("M-8")
async def test_a_claim_raises_fence_and_attempt_and_marks_the_job(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=3))
    lease = await claim_one(queue)
    assert (lease.attempt, lease.fence, lease.max_attempts) == (1, 1, 3)
    assert 0 < lease.lease_ms <= stage.lease_ms
    stored = await record(stage, job_id)
    assert (stored.state, stored.attempt, stored.fence) == (stage.words.running, 1, 1)
    assert stored.worker_id == "w1"
    assert stored.lease_until_ms == lease.lease_until_ms
    await settle(queue, lease, "retry", delay_ms=0)
    again = await claim_one(queue)
    assert (again.attempt, again.fence) == (2, 2)
    assert (again.fence, again.token) != (lease.fence, lease.token)


async def test_eight_parallel_claimers_never_share_a_lease(stage: Stage) -> None:
    producer = stage.queue()
    jobs = [job() for _ in range(200)]
    ids = [new.job_id for new in jobs]
    taken: list[Lease] = []

    async def work(name: str) -> None:
        queue = stage.queue(name)
        while len(taken) < len(ids):
            leases = await queue.claim(7, wait_ms=20)
            taken.extend(leases)
            for lease in leases:
                await settle(queue, lease, "complete")

    await asyncio.gather(
        *(work(f"w{n}") for n in range(8)),
        *(submit(producer, *jobs[at : at + 20]) for at in range(0, 200, 20)),
    )
    assert sorted(lease.job_id for lease in taken) == sorted(ids)
    assert {lease.attempt for lease in taken} == {1}


async def test_eight_parallel_calls_of_one_instance_never_share_a_lease(stage: Stage) -> None:
    queue = stage.queue("w1")
    ids = await submit(queue, *[job() for _ in range(40)])
    answers = await asyncio.gather(*(queue.claim(5, wait_ms=200) for _ in range(8)))
    claimed = [lease.job_id for leases in answers for lease in leases]
    assert sorted(claimed) == sorted(ids)


async def test_a_waiting_claim_wakes_up_when_a_job_arrives(stage: Stage) -> None:
    claimer, producer = stage.queue("w1"), stage.queue()
    waiting = asyncio.create_task(claimer.claim(1, wait_ms=10_000))
    await asyncio.sleep(0)  # lets the claim begin; whether it is waiting already does not matter
    began_s = time.monotonic()
    (job_id,) = await submit(producer, job())
    (lease,) = await waiting
    assert lease.job_id == job_id
    assert time.monotonic() - began_s < 5


async def test_a_waiting_claim_ends_when_its_time_is_over(stage: Stage) -> None:
    queue = stage.queue("w1")
    began_s = time.monotonic()
    assert await queue.claim(1, wait_ms=60) == []
    assert 0.05 <= time.monotonic() - began_s < 5


async def test_a_second_call_does_not_outwait_its_own_time_behind_one_that_waits(
    stage: Stage,
) -> None:
    queue, producer = stage.queue("w1"), stage.queue()
    assert await queue.claim(1, wait_ms=0) == []
    waiting = asyncio.create_task(queue.claim(1, wait_ms=20_000))
    await asyncio.sleep(0)
    began_s = time.monotonic()
    assert await queue.claim(1, wait_ms=0) == []
    assert await queue.claim(1, wait_ms=30) == []
    assert time.monotonic() - began_s < 5
    (job_id,) = await submit(producer, job())
    (lease,) = await waiting
    assert lease.job_id == job_id


async def test_jobs_that_arrive_one_by_one_are_each_heard_of_at_once(stage: Stage) -> None:
    """A claim that follows one that took the last job waits, and misses nothing in between."""
    queue, producer = stage.queue("w1"), stage.queue()
    began_s = time.monotonic()
    for _ in range(20):
        (job_id,) = await submit(producer, job())
        (lease,) = await queue.claim(5, wait_ms=20_000)
        assert lease.job_id == job_id
        await settle(queue, lease, "complete")
    assert time.monotonic() - began_s < 5


async def test_a_cancelled_claim_loses_no_job(stage: Stage) -> None:
    """Whether or not it had taken something when it was cancelled, the next claim has it all."""
    queue, producer = stage.queue("w1"), stage.queue()
    for _ in range(10):
        waiting = asyncio.create_task(queue.claim(1, wait_ms=10_000))
        await asyncio.sleep(0)
        (job_id,) = await submit(producer, job())
        waiting.cancel()
        answers = await asyncio.gather(waiting, return_exceptions=True)
        got = [lease for answer in answers if isinstance(answer, list) for lease in answer]
        lease = got[0] if got else await claim_one(queue)
        assert lease.job_id == job_id
        await settle(queue, lease, "complete")


@pytest.mark.clause("M-2")
async def test_the_trace_of_the_submitter_reaches_the_worker(stage: Stage) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job(trace=trace))
    assert (await claim_one(queue)).trace == trace
    record = await stage.ledger.get(job_id)
    assert record is not None
    assert record.trace == trace
