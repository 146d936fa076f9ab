"""A job without a handler here: handed back later and later, by a count that the store keeps."""

from itertools import pairwise
from random import Random

from structlog.testing import capture_logs

from leasehold.core.lease import Lease, Report
from leasehold.core.outcome import Outcome
from leasehold.worker import task
from leasehold.worker.task import Tasks
from leasehold.worker.unknown import Unknown, hand_back_ms

LIMIT_MS = 3_600_000


@task("render")
def render() -> None:
    """A handler of another task."""


class Worker:
    """One process: what it remembers is gone with it."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.said: list[Report] = []
        self.unknown = Unknown(
            Tasks([render]), limit_ms=LIMIT_MS, clock=lambda: self.now_s, rng=Random(1)
        )

    def meet(self, handed_back: int, *, age_ms: int) -> Outcome:
        lease = Lease(
            job_id="j",
            queue="q",
            task="rendre",
            payload=b"{}",
            attempt=1,
            max_attempts=1,
            fence=handed_back + 1,
            token="t",
            lease_until_ms=age_ms + 10_500,
            lease_ms=500,
            created_ms=10_000,
        )
        return self.unknown.judge(lease, self.said.append)


def test_the_delay_grows_with_every_hand_back_whichever_worker_made_it() -> None:
    delays = [Worker().meet(times, age_ms=0).delay_ms for times in range(9)]
    assert all(a < b for a, b in pairwise(delays[:7]))
    assert all(60_000 <= delay <= 75_000 for delay in delays[6:])


def test_the_limit_outlives_the_workers_that_handed_the_job_back() -> None:
    """An hour of hand-backs by others counts; a new worker only makes sure for a minute."""
    worker = Worker()
    assert worker.meet(70, age_ms=LIMIT_MS).kind == "snooze"
    worker.now_s += 61
    over = worker.meet(71, age_ms=LIMIT_MS + 61_000)
    assert over.kind == "bury"
    assert over.failure is not None
    assert not over.failure.retryable
    assert "did you mean 'render'?" in over.failure.message


def test_an_old_job_that_was_never_handed_back_is_not_failed_at_first_sight() -> None:
    worker = Worker()
    worker.meet(0, age_ms=0)
    worker.now_s += 7_200
    assert worker.meet(0, age_ms=LIMIT_MS * 10).kind == "snooze"


def test_a_job_whose_handler_snoozed_it_often_is_not_failed_before_the_limit() -> None:
    worker = Worker()
    worker.meet(500, age_ms=0)
    worker.now_s += 61
    assert worker.meet(501, age_ms=LIMIT_MS - 1).kind == "snooze"


def test_the_log_names_job_task_and_nearest_name_once_a_minute() -> None:
    worker = Worker()
    with capture_logs() as lines:
        for times in range(5):
            worker.meet(times, age_ms=0)
        worker.now_s += 61
        worker.meet(5, age_ms=0)
    assert [line["event"] for line in lines] == ["task_unknown"] * 2
    assert (lines[0]["job_id"], lines[0]["task"], lines[0]["nearest"]) == ("j", "rendre", "render")
    assert len(worker.said) == 1


def test_a_short_limit_leaves_room_for_several_hand_backs() -> None:
    assert [hand_back_ms(times, 400) for times in range(4)] == [40, 80, 160, 320]
