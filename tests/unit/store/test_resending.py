"""Submitting again after a lost answer."""

from collections.abc import Sequence

import pytest

from leasehold.core.errors import ReplyLost
from leasehold.core.job import NewJob, Submitted
from leasehold.store.resending import submit_surely

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
    (answer,) = await submit_surely(queue, JOBS)
    assert (answer.job_id, queue.calls) == ("j1", 3)


async def test_the_third_lost_answer_is_told() -> None:
    queue = Forgetful(3)
    with pytest.raises(ReplyLost):
        await submit_surely(queue, JOBS)
    assert queue.calls == 3
