"""When schedules are due: cron patterns through clock changes, intervals, and missed times."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from tenure.core.errors import UsageError
from tenure.core.job import Missed, NewJob, Schedule, Submitted
from tenure.core.registry import open_ledger, open_queue
from tenure.plans.schedule import (
    GROUP,
    LATE_MS,
    ROUND_BYTES_MAX,
    ROUND_JOBS_MAX,
    STORED_BYTES_MAX,
    StoredSchedules,
    due_times,
    last_time,
    new_schedule,
    next_time,
    occurrence_id,
)

JOB = NewJob(task="report", payload=b"{}")
MINUTE_MS = 60_000


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def at(text: str, zone: str = "+00:00") -> int:
    return ms(text + zone)


def cron(pattern: str, tz: str = "", missed: Missed = "one") -> Schedule:
    return new_schedule(JOB, cron=pattern, tz=tz, missed=missed)


def times(schedule: Schedule, after_ms: int, count: int) -> list[str]:
    found = []
    for _ in range(count):
        after_ms = next_time(schedule, after_ms)
        found.append(datetime.fromtimestamp(after_ms / 1000, UTC).isoformat())
    return found


def test_a_pattern_is_read_in_its_time_zone() -> None:
    schedule = cron("0 3 * * *", "Europe/Berlin")
    assert times(schedule, at("2026-11-18T12:00:00"), 1) == ["2026-11-19T02:00:00+00:00"]
    assert times(cron("0 3 * * *"), at("2026-11-18T12:00:00"), 1) == ["2026-11-19T03:00:00+00:00"]


def test_a_time_that_a_clock_change_skips_happens_once_after_the_gap() -> None:
    schedule = cron("15,30 2 * * *", "Europe/Berlin")  # 2026-03-29: 02:00 to 03:00 is skipped
    assert times(schedule, at("2026-03-28T12:00:00"), 3) == [
        "2026-03-29T01:00:00+00:00",
        "2026-03-30T00:15:00+00:00",
        "2026-03-30T00:30:00+00:00",
    ]


def test_a_time_that_a_clock_change_repeats_happens_once() -> None:
    schedule = cron("30 2 * * *", "Europe/Berlin")  # 2026-10-25: 02:30 comes twice
    first = next_time(schedule, at("2026-10-24T12:00:00"))
    assert first == at("2026-10-25T00:30:00")
    # Seen from the second 02:15 of that night, the library finds the first 02:30 again.
    assert next_time(schedule, at("2026-10-25T01:15:00")) == at("2026-10-26T01:30:00")


def test_the_last_time_is_the_one_at_or_before_a_moment() -> None:
    schedule = cron("0 * * * *")
    assert last_time(schedule, at("2026-11-18T12:00:00")) == at("2026-11-18T12:00:00")
    assert last_time(schedule, at("2026-11-18T12:59:59")) == at("2026-11-18T12:00:00")
    every = new_schedule(JOB, every_s=10)
    assert last_time(every, 20_000) == 20_000
    assert last_time(every, 29_999) == 20_000
    assert next_time(every, 20_000) == 30_000


def test_an_interval_is_the_same_grid_for_everyone() -> None:
    schedule = new_schedule(JOB, every_s=timedelta(minutes=5))
    assert next_time(schedule, at("2026-11-18T12:01:07")) == at("2026-11-18T12:05:00")


@pytest.mark.parametrize(
    ("missed", "minutes_late", "expected"),
    [
        ("one", 0, ["12:00"]),
        ("one", 180, ["15:00"]),
        ("skip", 0, ["12:00"]),
        ("skip", 180.5, ["15:00"]),
        ("skip", 190, []),
        ("all", 180, ["12:00", "13:00", "14:00", "15:00"]),
    ],
)
def test_missed_times_make_jobs_by_their_policy(
    missed: Missed, minutes_late: float, expected: list[str]
) -> None:
    due = at("2026-11-18T12:00:00")
    schedule = Schedule(
        name="r", template=cron("* * * * *").template, cron="0 * * * *", missed=missed, next_ms=due
    )
    now = due + round(minutes_late * MINUTE_MS)
    found, next_ms = due_times(schedule, now, 1_000)
    assert [f"{datetime.fromtimestamp(each / 1000, UTC):%H:%M}" for each in found] == expected
    assert next_ms == next_time(schedule, now)
    assert LATE_MS == MINUTE_MS


def test_a_long_pause_is_passed_in_one_step() -> None:
    schedule = Schedule(
        name="r", template=cron("* * * * *").template, cron="* * * * *", next_ms=at("1990-01-01")
    )
    found, next_ms = due_times(schedule, at("2026-11-18T12:00:30"), 0)
    assert found == [at("2026-11-18T12:00:00")]
    assert next_ms == at("2026-11-18T12:01:00")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cron": "0 3 * *"}, "five fields"),
        ({"cron": "61 3 * * *"}, "Bad minute"),
        ({"cron": "0 3 31 2 *"}, "Bad day"),
        ({"cron": "0 3 * * *", "tz": "Europe/Nowhere"}, "no time zone 'Europe/Nowhere'"),
        ({"cron": "0 3 * * *", "every_s": 5}, "either"),
        ({}, "either"),
        ({"every_s": 0.01}, "from 0.1 to "),
        ({"every_s": "5"}, "from 0.1 to .* not '5'"),
        ({"every_s": math.nan}, "from 0.1 to .* not nan"),
        ({"every_s": math.inf}, "from 0.1 to .* not inf"),
        ({"every_s": 5, "tz": "UTC"}, "only cron has a time zone"),
        ({"every_s": 5, "missed": "some"}, "skip, one or all"),
        ({"every_s": 5, "name": "a b"}, "letters, digits"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_with_the_reason(
    given: dict[str, object], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        new_schedule(JOB, **given)  # type: ignore[arg-type]


def test_a_schedule_has_the_name_of_its_task() -> None:
    job = NewJob(task="video:make it", payload=b"{}")
    assert new_schedule(job, every_s=1).name == "video-make-it"


def schedules(name: str) -> StoredSchedules:
    found = open_queue(f"memory://{name}").features.schedules
    assert isinstance(found, StoredSchedules)
    return found


async def test_a_full_queue_holds_a_schedule_up_and_loses_no_time() -> None:
    stored = schedules("schedule-full")
    await stored.put(new_schedule(JOB, every_s=1, missed="all"))
    asked: list[str] = []

    async def refuse(jobs: Sequence[NewJob]) -> list[Submitted]:
        asked.extend(job.job_id for job in jobs)
        return [Submitted("", "full", "the queue is full") for _ in jobs]

    (before,) = await stored.list()
    assert await stored.enqueue_due(refuse, 1_000) == []
    assert list(await stored.list()) == [before]
    assert asked[0] == occurrence_id("report", before.next_ms)


async def test_a_job_that_the_queue_refuses_is_shown_as_the_schedule_s_error() -> None:
    stored = schedules("schedule-refused")
    await stored.put(new_schedule(JOB, every_s=1))

    async def refuse(jobs: Sequence[NewJob]) -> list[Submitted]:
        return [Submitted("", "invalid", "no such stream") for _ in jobs]

    (moved,) = await stored.enqueue_due(refuse, 1_000)
    assert moved.error == "no such stream"
    (shown,) = await open_ledger("memory://schedule-refused").features.schedules.list()  # type: ignore[union-attr]
    assert shown == moved


async def test_the_schedules_of_a_queue_have_a_size_together() -> None:
    ledger = open_ledger("memory://schedule-sizes")
    schedules = ledger.features.schedules
    assert schedules is not None
    large = NewJob(task="report", payload=b'"%b"' % (b"x" * (STORED_BYTES_MAX // 4)))
    for number in range(3):
        await schedules.put(new_schedule(large, name=f"s{number}", every_s=60))
    for _ in range(2):
        with pytest.raises(UsageError, match="together; remove one"):
            await schedules.put(new_schedule(large, name="s3", every_s=60))
    await schedules.put(new_schedule(JOB, name="s4", every_s=60))
    await schedules.put(new_schedule(large, name="s0", every_s=90))
    assert await schedules.remove("s1")
    await schedules.put(new_schedule(large, name="s3", every_s=60))
    await ledger.close()


async def store(stored: StoredSchedules, schedule: Schedule) -> None:
    text = msgspec.json.encode(schedule).decode()
    assert await stored._records.swap(GROUP, schedule.name, "", text)


def long_due(name: str, payload: str = "1") -> Schedule:
    """A schedule with a thousand times and more that passed and need a job each."""
    job = NewJob(task="report", payload=payload.encode())
    made = new_schedule(job, name=name, every_s=0.1, missed="all")
    return msgspec.structs.replace(made, next_ms=time.time_ns() // 10**8 * 100 - 200_000)


class Rounds:
    """Takes all jobs, and remembers those of each round."""

    def __init__(self) -> None:
        self.jobs: list[NewJob] = []

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        self.jobs = list(jobs)
        return [Submitted(job.job_id, "created") for job in jobs]


async def test_a_round_stores_a_bounded_number_of_bytes_and_the_next_goes_on() -> None:
    stored, rounds = schedules("schedule-bytes"), Rounds()
    await store(stored, long_due("large", '"%s"' % ("x" * (1 << 20))))
    found: list[str] = []
    for _ in range(2):
        await stored.enqueue_due(rounds.submit, 1_000)
        assert 10 <= len(rounds.jobs) <= ROUND_BYTES_MAX >> 20
        found += [job.job_id for job in rounds.jobs]
    (schedule,) = await stored.list()
    times = [int(job_id.partition("@")[2]) for job_id in found]
    assert times == list(range(times[0], schedule.next_ms, 100))


async def test_a_round_stores_a_bounded_number_of_jobs_and_leaves_no_schedule_out_for_ever() -> (
    None
):
    stored, rounds = schedules("schedule-jobs"), Rounds()
    for number in range(15):
        await store(stored, long_due(f"s{number}"))
    served: set[str] = set()
    for _ in range(200):  # which ones a full round leaves out is left to chance
        await stored.enqueue_due(rounds.submit, 1_000)
        assert len(rounds.jobs) <= ROUND_JOBS_MAX
        served |= {job.job_id.partition("@")[0] for job in rounds.jobs}
        if len(served) == 15:
            break
    assert len(served) == 15


async def test_a_record_that_cannot_be_read_stops_no_other_schedule() -> None:
    stored, rounds = schedules("schedule-deep"), Rounds()
    deep = '{"name":"deep","template":{"task":"t","options":{"a":%s}}}' % (
        "[" * 100_000 + "]" * 100_000
    )
    assert await stored._records.swap(GROUP, "deep", "", deep)
    await store(stored, long_due("sound"))
    assert [each.name for each in await stored.enqueue_due(rounds.submit, 1_000)] == ["sound"]
    assert [each.name for each in await stored.list()] == ["sound"]
