"""Settle: the seven outcomes and what becomes of the job."""

import time

import pytest

from tenure.core.outcome import (
    BURIED,
    CANCELLED,
    COMPLETED,
    RELEASED,
    Failure,
    Retried,
)
from tests.contract.adapters import Stage
from tests.contract.suite.acting import (
    claim,
    claim_one,
    claim_when_due,
    job,
    nothing_to_claim,
    record,
    settle,
    state,
    submit,
)

pytestmark = pytest.mark.clause("M-15")
DELAY_MS = 200


async def test_complete_ends_the_job_with_its_result(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job())
    verdict = await settle(queue, await claim_one(queue), "complete", result=b'{"n":[1,2]}')
    assert verdict == COMPLETED
    stored = await record(stage, job_id)
    assert (stored.state, stored.result) == (stage.words.done, b'{"n":[1,2]}')
    assert stored.lease_until_ms == 0
    assert await nothing_to_claim(queue)


async def test_bury_ends_the_job_with_its_error(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=5))
    failure = Failure(code="Fatal", message='no "way"', stack="line 1\nline 2", retryable=False)
    assert await settle(queue, await claim_one(queue), "bury", failure=failure) == BURIED
    stored = await record(stage, job_id)
    assert stored.state == stage.words.failed
    assert b"Fatal" in stored.error
    assert await nothing_to_claim(queue)


async def test_cancel_ends_the_job_as_cancelled(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job())
    assert await settle(queue, await claim_one(queue), "cancel") == CANCELLED
    assert await state(stage, job_id) == stage.words.cancelled


async def test_retry_brings_the_job_back_after_its_delay(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=3))
    lease, began_s = await claim_one(queue), time.monotonic()
    verdict = await settle(queue, lease, "retry", delay_ms=DELAY_MS)
    assert isinstance(verdict, Retried)
    assert verdict.due_ms > 0
    assert (await record(stage, job_id)).due_ms == verdict.due_ms
    again = await claim_when_due(stage, queue, DELAY_MS, began_s)
    assert (again.job_id, again.attempt) == (job_id, 2)


async def test_retry_without_delay_brings_the_job_back_at_once(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, job(max_attempts=3))
    assert await settle(queue, await claim_one(queue), "retry") == Retried(0)
    assert (await claim_one(queue)).attempt == 2


async def test_the_last_attempt_is_buried_by_the_store(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=2))
    assert isinstance(await settle(queue, await claim_one(queue), "retry"), Retried)
    assert await settle(queue, await claim_one(queue), "retry") == BURIED
    assert await state(stage, job_id) == stage.words.failed


@pytest.mark.options(retry_delay_ms=0)
async def test_fail_lets_the_attempts_that_the_job_names_decide(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=2))
    assert isinstance(await settle(queue, await claim_one(queue), "fail"), Retried)
    assert await settle(queue, await claim_one(queue), "fail") == BURIED
    stored = await record(stage, job_id)
    assert (stored.state, stored.attempt) == (stage.words.failed, 2)


@pytest.mark.needs("retry_by_options")
@pytest.mark.options(max_attempts=2, retry_delay_ms=0)
async def test_fail_follows_the_queue_where_the_job_names_no_attempts(stage: Stage) -> None:
    queue = stage.queue("w1")
    await submit(queue, job())
    assert isinstance(await settle(queue, await claim_one(queue), "fail"), Retried)
    assert await settle(queue, await claim_one(queue), "fail") == BURIED


@pytest.mark.clause("M-16", "M-8")
async def test_snooze_does_not_count_the_attempt(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=1))
    lease = await claim_one(queue)
    for fence in (1, 2, 3, 4):
        assert (lease.attempt, lease.fence) == (1, fence)
        began_s = time.monotonic()
        assert isinstance(await settle(queue, lease, "snooze", delay_ms=DELAY_MS), Retried)
        lease = await claim_when_due(stage, queue, DELAY_MS, began_s)
    assert await settle(queue, lease, "complete") == COMPLETED
    assert await state(stage, job_id) == stage.words.done


@pytest.mark.needs("one_order")
@pytest.mark.clause("M-16", "M-8")
async def test_release_hands_the_job_back_at_once_and_to_its_old_turn(stage: Stage) -> None:
    queue, other = stage.queue("leaving"), stage.queue("staying")
    ids = await submit(queue, *[job(max_attempts=1) for _ in range(4)])
    first, second = await claim(queue, 2)
    assert await settle(queue, second, "release") == RELEASED
    assert await settle(queue, first, "release") == RELEASED
    stored = await record(stage, ids[0])
    assert (stored.state, stored.attempt, stored.fence) == (stage.words.waiting, 0, 1)
    again = await claim(other, 4)
    assert [lease.job_id for lease in again] == ids
    assert [(lease.attempt, lease.fence) for lease in again] == [(1, 2), (1, 2), (1, 1), (1, 1)]


async def test_a_retried_job_keeps_the_error_of_its_last_attempt(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=3))
    failure = Failure(code="Flaky", message="again please")
    await settle(queue, await claim_one(queue), "retry", failure=failure)
    assert b"Flaky" in (await record(stage, job_id)).error
