"""Pause: no leases are handed out; what runs goes on."""

import asyncio

import pytest

from tenure.core.lease import Lease
from tenure.core.outcome import COMPLETED
from tests.contract.adapters import Stage
from tests.contract.suite.acting import claim_one, job, nothing_to_claim, settle, submit

pytestmark = pytest.mark.clause("M-10")


async def test_a_paused_queue_hands_out_nothing_until_resumed(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job())
    await stage.ledger.pause()
    assert (await stage.ledger.counts()).paused
    assert await nothing_to_claim(queue)
    await submit(queue, job())
    assert await nothing_to_claim(queue)
    await stage.ledger.resume()
    assert not (await stage.ledger.counts()).paused
    assert (await claim_one(queue)).job_id == job_id


@pytest.mark.leases_run_out
async def test_what_runs_goes_on_while_the_queue_is_paused(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, job())
    lease = await claim_one(queue)
    await stage.ledger.pause()
    await stage.advance(stage.lease_ms // 2)
    (kept,) = await queue.extend([lease])
    assert isinstance(kept, Lease)
    assert await settle(queue, kept, "complete") == COMPLETED


async def test_a_claim_that_waits_while_paused_wakes_up_on_resume(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job())
    await stage.ledger.pause()
    waiting = asyncio.create_task(queue.claim(1, wait_ms=10_000))
    await asyncio.sleep(0)
    await stage.ledger.resume()
    (lease,) = await asyncio.wait_for(waiting, 5)
    assert lease.job_id == job_id


async def test_pausing_twice_is_pausing_once(stage: Stage) -> None:
    queue = stage.queue("w1")
    await stage.ledger.pause()
    await stage.ledger.pause()
    await stage.ledger.resume()
    await submit(queue, job())
    assert await claim_one(queue)
