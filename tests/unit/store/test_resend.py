"""Submitting again after a lost answer."""

from collections.abc import Sequence

import pytest

from tenure.core.errors import NotReplicated, ReplyLost, StoreUnreachable, UsageError
from tenure.core.job import NewJob, Submitted
from tenure.store.resend import resend, run_step, submit_with_retry

JOBS = [NewJob(task="work", payload=b"{}", job_id="j1")]


class Forgetful:
    """Loses so many answers."""

    def __init__(self, losses: int) -> None:
        self.losses = losses
        self.calls = 0

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        self.calls += 1
        if self.calls <= self.losses:
            raise ReplyLost("no answer")
        return [Submitted(job.job_id, "replayed") for job in jobs]


async def test_two_lost_answers_are_asked_for_again() -> None:
    queue = Forgetful(2)
    (answer,) = await submit_with_retry(queue, JOBS)
    assert (answer.job_id, queue.calls) == ("j1", 3)


async def test_the_third_lost_answer_is_told() -> None:
    queue = Forgetful(3)
    with pytest.raises(ReplyLost):
        await submit_with_retry(queue, JOBS)
    assert queue.calls == 3


@pytest.mark.parametrize("later", [StoreUnreachable("away"), UsageError("closed")])
async def test_whatever_follows_a_lost_answer_leaves_the_call_in_doubt(later: Exception) -> None:
    faults = [ReplyLost("no answer"), later]

    async def call() -> None:
        raise faults.pop(0)

    with pytest.raises(ReplyLost, match="no answer; sent again"):
        await resend(call, tries=2, patience_s=5)


async def test_a_call_that_waited_for_replicas_in_vain_is_not_made_again() -> None:
    faults: list[Exception] = [ReplyLost("no answer"), NotReplicated("0 of 1 replicas have it")]

    async def call() -> None:
        raise faults.pop(0)

    with pytest.raises(NotReplicated):
        await resend(call, tries=5, patience_s=5)
    assert not faults


async def test_a_first_part_that_never_left_is_unreachable_and_a_later_one_in_doubt() -> None:
    async def away() -> None:
        raise StoreUnreachable("away")

    with pytest.raises(StoreUnreachable):
        await run_step(away(), executed_before=False)
    with pytest.raises(ReplyLost):
        await run_step(away(), executed_before=True)
