"""A job without a handler here: handed back later and later, by what this worker has seen of it."""

from itertools import pairwise
from random import Random

import pytest
from structlog.testing import capture_logs

from tenure.core.lease import Lease, Report
from tenure.core.outcome import Outcome
from tenure.worker import task
from tenure.worker.job import Attempt
from tenure.worker.settle import UnknownTasks, hand_back_ms
from tenure.worker.task import Tasks

LIMIT_MS = 3_600_000


@task("render")
def render() -> None:
    """A handler of another task."""


class Worker:
    """One process: what it remembers is gone with it."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.said: list[Report] = []
        self.unknown = UnknownTasks(
            Tasks([render]), limit_ms=LIMIT_MS, clock=lambda: self.now_s, rng=Random(1)
        )

    def meet(
        self,
        *,
        fence: int = 1,
        job_id: str = "j",
        attempt: int = 1,
        ttl_ms: int = 0,
        task: str = "rendre",
    ) -> Outcome:
        now_ms = round(self.now_s * 1000)
        lease = Lease(
            job_id=job_id,
            queue="q",
            task=task,
            payload=b"{}",
            attempt=attempt,
            max_attempts=1,
            fence=fence,
            token="t",
            lease_until_ms=now_ms + 500,
            lease_ms=500,
            created_ms=1_000_000,
            ttl_ms=ttl_ms,
        )
        return self.unknown.decide_outcome(Attempt(lease, 0.0, 0.0), self.said.append)


def test_the_delay_grows_with_every_hand_back() -> None:
    worker = Worker()
    delays = [worker.meet().delay_ms for _ in range(9)]
    assert all(a < b for a, b in pairwise(delays[:7]))
    assert all(60_000 <= delay <= 75_000 for delay in delays[6:])
    assert worker.meet(job_id="other").delay_ms < 2_000


def test_a_job_that_this_worker_handed_back_for_the_limit_fails() -> None:
    worker = Worker()
    for _ in range(3):
        worker.meet()
    worker.now_s += LIMIT_MS / 1000 - 1
    assert worker.meet().kind == "snooze"
    worker.now_s += 1
    over = worker.meet()
    assert over.kind == "bury"
    assert over.failure is not None
    assert not over.failure.retryable
    assert "did you mean 'render'?" in over.failure.message


def test_a_job_that_its_own_handler_snoozed_often_is_not_failed_at_first_sight() -> None:
    worker = Worker()
    worker.meet(job_id="young")
    worker.now_s += 61
    polling = worker.meet(job_id="polling", fence=80)
    assert (polling.kind, polling.delay_ms < 2_000) == ("snooze", True)


def test_a_job_is_handed_back_several_times_even_where_each_takes_the_limit() -> None:
    worker = Worker()
    for _ in range(4):
        assert worker.meet().kind == "snooze"
        worker.now_s += LIMIT_MS / 1000
    assert worker.meet().kind == "bury"


def test_an_old_job_is_not_failed_at_first_sight_by_a_worker_that_missed_its_task_for_long() -> (
    None
):
    worker = Worker()
    worker.meet(job_id="earlier")
    worker.now_s += 7_200
    assert worker.meet().kind == "snooze"


def test_what_is_remembered_of_jobs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenure.worker.settle._JOBS_MAX", 10)
    worker = Worker()
    for number in range(30):
        worker.meet(job_id=f"j{number}")
        worker.meet(job_id="often")
    assert worker.meet(job_id="often").delay_ms >= 60_000
    assert worker.meet(job_id="j0").delay_ms < 2_000


def test_the_log_names_job_task_and_nearest_name_once_a_minute() -> None:
    worker = Worker()
    with capture_logs() as lines:
        for _ in range(5):
            worker.meet()
        worker.now_s += 61
        worker.meet()
    assert [line["event"] for line in lines] == ["task_unknown"] * 2
    assert (lines[0]["job_id"], lines[0]["task"], lines[0]["nearest"]) == ("j", "rendre", "render")
    assert len(worker.said) == 1


def test_the_log_names_so_many_unknown_tasks_a_minute_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker()
    searched: list[str] = []

    def close(_: Tasks, name: str) -> str:
        searched.append(name)
        return ""

    monkeypatch.setattr(Tasks, "close", close)
    with capture_logs() as lines:
        for minute in range(3):
            worker.now_s += 61
            for number in range(500):
                worker.meet(job_id=f"j{number}", task=f"t{minute}-{number}")
            assert len(lines) == 100 * (minute + 1)
    assert {line["event"] for line in lines} == {"task_unknown"}
    assert len(searched) <= 600, "the nearest name is slow to find"


def test_a_short_limit_leaves_room_for_several_hand_backs() -> None:
    assert [hand_back_ms(times, 400) for times in range(4)] == [40, 80, 160, 320]


def test_a_job_with_a_time_to_live_fails_with_the_nearest_name_before_that_ends() -> None:
    worker, waited_ms = Worker(), 0
    while (met := worker.meet(ttl_ms=30_000)).kind == "snooze":
        waited_ms += met.delay_ms
        worker.now_s += met.delay_ms / 1000
    assert 25_000 < waited_ms < 30_000
    assert met.kind == "bury"
    assert met.failure is not None
    assert "did you mean 'render'?" in met.failure.message


def test_a_long_time_to_live_is_longer_than_the_usual_limit() -> None:
    worker = Worker()
    for _ in range(5):
        worker.meet(ttl_ms=LIMIT_MS * 3)
    worker.now_s += LIMIT_MS / 1000 * 2
    assert worker.meet(ttl_ms=LIMIT_MS * 3).kind == "snooze"


def test_the_time_to_live_counts_until_the_first_start_only() -> None:
    worker = Worker()
    worker.now_s += 60
    assert worker.meet(ttl_ms=30_000, attempt=2).kind == "snooze"
