"""Lost answers: every call may be sent again, and nothing is lost or done twice."""

import asyncio

import pytest

from tenure.core.errors import LeaseLost, StoreError
from tenure.core.outcome import (
    COMPLETED,
    Buried,
    Completed,
    Outcome,
    OutcomeKind,
    Released,
    Retried,
)
from tests.contract.adapters import Stage
from tests.contract.suite.acting import (
    FAILURE,
    answered,
    claim,
    claim_one,
    job,
    record,
    run_out,
    settle,
    state,
    submit,
)


@pytest.mark.clause("M-3")
async def test_a_submit_whose_answer_was_lost_is_sent_again_and_stored_once(stage: Stage) -> None:
    queue, lose = await stage.lossy_queue("w1")
    jobs = [job(), job()]
    lose()
    with pytest.raises(StoreError):
        await queue.submit(jobs)
    again = await answered(lambda: queue.submit(jobs))
    assert [answer.status for answer in again] == ["replayed", "replayed"]
    assert len(await claim(queue, 2)) == 2
    assert await queue.claim(10, wait_ms=0) == []


@pytest.mark.clause("M-9")
async def test_a_claim_whose_answer_was_lost_loses_nothing(stage: Stage) -> None:
    queue, lose = await stage.lossy_queue("w1")
    ids = await submit(queue, *[job(max_attempts=1) for _ in range(5)])
    lose()
    with pytest.raises(StoreError):
        await queue.claim(3, wait_ms=0)
    leases = await answered(lambda: claim(queue, 5))
    assert sorted(lease.job_id for lease in leases) == sorted(ids)
    for lease in leases:
        assert await settle(queue, lease, "complete") == COMPLETED


@pytest.mark.clause("M-9")
async def test_a_claim_that_waited_and_whose_answer_was_lost_loses_nothing(stage: Stage) -> None:
    queue, lose = await stage.lossy_queue("w1")
    producer = stage.queue()
    assert await queue.claim(1, wait_ms=1) == []  # whatever it needs to wait, it has now
    lose()
    waiting = asyncio.create_task(queue.claim(1, wait_ms=2_000))
    await asyncio.sleep(0)
    (job_id,) = await submit(producer, job(max_attempts=1))
    with pytest.raises(StoreError):
        await waiting
    lease = await answered(lambda: claim_one(queue))
    assert (lease.job_id, lease.attempt) == (job_id, 1)
    assert await settle(queue, lease, "complete") == COMPLETED


@pytest.mark.clause("M-9")
async def test_a_lost_answer_costs_no_attempt(stage: Stage) -> None:
    """Nobody ran the job, so a job that may start once must still be started."""
    queue, lose = await stage.lossy_queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=1))
    for _ in range(3):
        lose()
        with pytest.raises(StoreError):
            await queue.claim(1, wait_ms=0)
    lease = await answered(lambda: claim_one(queue))
    assert (lease.job_id, lease.attempt) == (job_id, 1)
    assert await settle(queue, lease, "complete") == COMPLETED


@pytest.mark.clause("M-9")
async def test_after_a_lost_answer_what_is_held_is_not_handed_out_again(stage: Stage) -> None:
    queue, lose = await stage.lossy_queue("w1")
    await submit(queue, *[job() for _ in range(4)])
    held = await claim(queue, 2)
    lose()
    with pytest.raises(StoreError):
        await queue.claim(1, wait_ms=0)
    rest = await answered(lambda: claim(queue, 2))
    assert not {lease.job_id for lease in held} & {lease.job_id for lease in rest}
    for lease in [*held, *rest]:
        assert await settle(queue, lease, "complete") == COMPLETED


@pytest.mark.leases_run_out
@pytest.mark.clause("M-9", "M-13")
async def test_what_a_dead_process_never_heard_of_comes_back(stage: Stage) -> None:
    """The claimer died with its lost answer; a new process under the same name gets the job."""
    queue, lose = await stage.lossy_queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=5))
    lose()
    with pytest.raises(StoreError):
        await queue.claim(1, wait_ms=0)
    reborn = stage.queue("w1")
    await run_out(stage)
    lease = await claim_one(reborn)
    assert lease.job_id == job_id
    assert await settle(reborn, lease, "complete") == COMPLETED


@pytest.mark.clause("M-17")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("complete", Completed),
        ("bury", Buried),
        ("retry", Retried),
        ("snooze", Retried),
        ("release", Released),
        ("fail", Retried),
    ],
)
async def test_a_settle_sent_again_gets_the_same_verdict(
    stage: Stage, kind: OutcomeKind, expected: type
) -> None:
    queue, lose = await stage.lossy_queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=3))
    lease = await claim_one(queue)
    delay_ms = 60_000 if kind in ("retry", "snooze", "fail") else 0
    outcome = Outcome(lease, kind, b'"r"', None if kind == "complete" else FAILURE, delay_ms)
    lose()
    with pytest.raises(StoreError):
        await queue.settle([outcome])
    before = await record(stage, job_id)
    (first,) = await answered(lambda: queue.settle([outcome]))
    decided = await record(stage, job_id)
    if before.state != "failed":  # there a failed job may rest until it is decided
        assert decided == before
    (second,) = await queue.settle([outcome])
    assert first == second
    assert type(first) is expected
    assert await record(stage, job_id) == decided


@pytest.mark.clause("M-17")
async def test_a_settle_sent_again_is_answered_even_when_another_attempt_runs(
    stage: Stage,
) -> None:
    queue, other = stage.queue("w1"), stage.queue("w2")
    await submit(queue, job(max_attempts=5))
    outcome = Outcome(await claim_one(queue), "retry", failure=FAILURE)
    assert await queue.settle([outcome]) == [Retried(0)]
    current = await claim_one(other)
    assert await queue.settle([outcome]) == [Retried(0)]
    assert await settle(other, current, "complete") == COMPLETED


@pytest.mark.clause("M-17")
async def test_another_outcome_for_an_ended_lease_is_refused(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=3))
    lease = await claim_one(queue)
    assert await settle(queue, lease, "complete", result=b"1") == COMPLETED
    for kind in ("retry", "bury", "release", "snooze", "cancel"):
        assert isinstance(await settle(queue, lease, kind), LeaseLost)  # type: ignore[arg-type]
    assert await state(stage, job_id) == stage.words.done
    assert (await record(stage, job_id)).result == b"1"


@pytest.mark.leases_run_out
@pytest.mark.clause("M-12")
async def test_an_extend_or_report_whose_answer_was_lost_may_be_sent_again(stage: Stage) -> None:
    queue, lose = await stage.lossy_queue("w1")
    await submit(queue, job())
    lease = await claim_one(queue)
    await stage.advance(stage.lease_ms // 2)
    lose()
    with pytest.raises(StoreError):
        await queue.extend([lease])
    (kept,) = await answered(lambda: queue.extend([lease]))
    assert not isinstance(kept, LeaseLost)
    assert kept.lease_until_ms > lease.lease_until_ms
