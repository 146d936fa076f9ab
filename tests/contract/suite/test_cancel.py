"""Cancel: waiting jobs end at once, running ones through their worker."""

import pytest

from tenure.core.lease import Lease
from tenure.core.outcome import BURIED, CANCELLED, COMPLETED, OutcomeKind
from tests.contract.adapters import Stage
from tests.contract.suite.acting import claim_one, job, nothing_to_claim, settle, state, submit

pytestmark = pytest.mark.clause("M-19")


async def test_a_waiting_job_is_cancelled_at_once(stage: Stage) -> None:
    queue = stage.queue("w1")
    now, later = await submit(queue, job(), job(delay_ms=60_000))
    assert await stage.ledger.cancel([now, later]) == ["ok", "ok"]
    assert [await state(stage, each) for each in (now, later)] == [stage.words.cancelled] * 2
    assert await nothing_to_claim(queue)


@pytest.mark.clause("M-12")
async def test_the_holder_of_a_running_job_hears_of_it_when_it_extends(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job())
    lease = await claim_one(queue)
    (kept,) = await queue.extend([lease])
    assert isinstance(kept, Lease)
    assert not kept.cancel_requested
    (answer,) = await stage.ledger.cancel([job_id])
    assert answer in ("ok", "requested")
    assert await state(stage, job_id) == stage.words.running
    (told,) = await queue.extend([lease])
    assert isinstance(told, Lease)
    assert told.cancel_requested
    assert await settle(queue, told, "cancel") == CANCELLED
    assert await state(stage, job_id) == stage.words.cancelled


@pytest.mark.clause("M-18")
@pytest.mark.parametrize("kind", ["fail", "retry", "snooze", "release"])
async def test_a_job_to_be_cancelled_does_not_go_back_to_the_queue(
    stage: Stage, kind: OutcomeKind
) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job(max_attempts=5))
    lease = await claim_one(queue)
    await stage.ledger.cancel([job_id])
    assert await settle(queue, lease, kind) == CANCELLED
    assert await state(stage, job_id) == stage.words.cancelled
    assert await nothing_to_claim(queue)


@pytest.mark.clause("M-18")
async def test_a_job_that_was_done_before_it_heard_stays_done(stage: Stage) -> None:
    queue = stage.queue("w1")
    done, buried = await submit(queue, job(), job())
    for job_id, kind, verdict in ((done, "complete", COMPLETED), (buried, "bury", BURIED)):
        lease = await claim_one(queue)
        await stage.ledger.cancel([job_id])
        assert await settle(queue, lease, kind) == verdict  # type: ignore[arg-type]


async def test_a_finished_or_unknown_job_cannot_be_cancelled(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job())
    await settle(queue, await claim_one(queue), "complete")
    finished, unknown = await stage.ledger.cancel([job_id, "no-such-job"])
    assert "ok" not in (finished, unknown)
    assert await state(stage, job_id) == stage.words.done


async def test_a_cancelled_job_can_be_sent_back_and_is_not_cancelled_again(stage: Stage) -> None:
    queue = stage.queue("w1")
    (job_id,) = await submit(queue, job())
    lease = await claim_one(queue)
    await stage.ledger.cancel([job_id])
    await settle(queue, lease, "cancel")
    assert await stage.ledger.retry([job_id]) == ["ok"]
    (kept,) = await queue.extend([await claim_one(queue)])
    assert isinstance(kept, Lease)
    assert not kept.cancel_requested
