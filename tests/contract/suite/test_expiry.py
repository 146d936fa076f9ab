"""Expiry and extend: a lease lasts while it is kept, and what runs out comes back."""

import pytest

from tenure.core.errors import LeaseLost
from tenure.core.lease import Lease
from tenure.core.outcome import COMPLETED
from tests.contract.adapters import Stage
from tests.contract.suite.acting import (
    claim,
    claim_one,
    job,
    nothing_to_claim,
    ordered,
    record,
    run_out,
    settle,
    state,
    submit,
)


@pytest.mark.leases_run_out
@pytest.mark.clause("M-13")
async def test_a_lease_that_ran_out_comes_to_another_worker(stage: Stage) -> None:
    first, second = stage.queue("dead"), stage.queue("alive")
    ids = await submit(first, *[job(max_attempts=3) for _ in range(3)])
    lost = await claim(first, 3)
    assert await nothing_to_claim(second)
    await run_out(stage)
    again = await claim(second, 3)
    assert ordered(stage, [lease.job_id for lease in again]) == ordered(stage, ids)
    assert [lease.fence for lease in again] == [lease.fence + 1 for lease in lost]
    assert [lease.attempt for lease in again] == [2, 2, 2]


@pytest.mark.leases_run_out
@pytest.mark.clause("M-12")
async def test_a_lease_that_is_extended_is_not_taken_away(stage: Stage) -> None:
    holder, rival = stage.queue("holder"), stage.queue("rival")
    await submit(holder, job(max_attempts=3))
    lease = await claim_one(holder)
    for _ in range(6):  # three lease lengths in all
        await stage.advance(stage.lease_ms // 2)
        (kept,) = await holder.extend([lease])
        assert isinstance(kept, Lease)
        assert kept.lease_until_ms >= lease.lease_until_ms
        assert 0 < kept.lease_ms <= stage.lease_ms
        assert await rival.claim(1, wait_ms=0) == []
        lease = kept
    assert await settle(holder, lease, "complete") == COMPLETED


@pytest.mark.leases_run_out
@pytest.mark.clause("M-12")
async def test_an_extend_that_comes_early_writes_nothing(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, job())
    lease = await claim_one(queue)
    for _ in range(3):
        (kept,) = await queue.extend([lease])
        assert isinstance(kept, Lease)
    events = await stage.journal.read()
    early = [event for event in events if event.type == "extend"]
    assert (
        not early or early[0].ts_ms - (lease.lease_until_ms - stage.lease_ms) > 0.3 * stage.lease_ms
    )


@pytest.mark.leases_run_out
@pytest.mark.needs("lost_is_attempt")
@pytest.mark.clause("M-13")
async def test_a_job_that_kills_its_workers_is_buried_with_a_reason(stage: Stage) -> None:
    queue = stage.queue("victim")
    (job_id,) = await submit(queue, job(max_attempts=2))
    for attempt in (1, 2):
        assert (await claim_one(queue)).attempt == attempt
        await run_out(stage)
    assert await nothing_to_claim(queue)
    await queue.upkeep()
    stored = await record(stage, job_id)
    assert (stored.state, stored.attempt) == (stage.words.failed, 2)
    assert b"lease" in stored.error


@pytest.mark.needs("one_order")
@pytest.mark.leases_run_out
@pytest.mark.clause("M-13")
async def test_what_ran_out_goes_before_what_came_later(stage: Stage) -> None:
    queue = stage.queue("w1")
    (first,) = await submit(queue, job(max_attempts=3))
    await claim_one(queue)
    await submit(queue, job(), job())
    await run_out(stage)
    assert (await claim(queue, 3))[0].job_id == first


@pytest.mark.leases_run_out
@pytest.mark.clause("M-13")
async def test_a_cancel_that_was_asked_for_holds_when_the_lease_runs_out(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=3))
    await claim_one(queue)
    await stage.ledger.cancel([job_id])
    await run_out(stage)
    assert await nothing_to_claim(queue)
    await queue.upkeep()
    assert await state(stage, job_id) == stage.words.cancelled


@pytest.mark.leases_run_out
@pytest.mark.clause("M-11")
async def test_an_expired_lease_that_nobody_took_may_go_on_or_not_but_never_both(
    stage: Stage,
) -> None:
    late, rival = stage.queue("late"), stage.queue("rival")
    await submit(late, job(max_attempts=3))
    lease = await claim_one(late)
    await run_out(stage)
    verdict = await settle(late, lease, "complete")
    taken = await rival.claim(1, wait_ms=50)
    assert isinstance(verdict, LeaseLost) == bool(taken)
