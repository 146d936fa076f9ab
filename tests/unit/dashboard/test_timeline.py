"""A job's story, read from the events of any contract."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tenure.core.job import JobEvent, JobRecord
from tenure.dashboard.app import templates
from tenure.dashboard.charts import Timeline, heat_map, sparkline, timeline
from tenure.dashboard.watch import Second, bucket_of


def record(state: str, updated_ms: int = 0, contract: str = "streams") -> JobRecord:
    return JobRecord(
        job_id="1", contract=contract, queue="q", task="t", state=state, created_ms=1_000,
        updated_ms=updated_ms,
    )  # fmt: skip


def told(*steps: tuple[str, int] | tuple[str, int, dict[str, object]]) -> list[JobEvent]:
    return [
        JobEvent(
            event_id=str(at),
            type=step[0],
            ts_ms=step[1],
            data=msgspec.json.encode(step[2] if len(step) > 2 else {}),
        )
        for at, step in enumerate(steps)
    ]


def shape(line: Timeline) -> list[tuple[int, str, list[tuple[str, int]]]]:
    return [
        (a.number, a.end, [(s.phase, s.to_ms - s.from_ms) for s in a.segments])
        for a in line.attempts
    ]


def test_a_job_that_succeeds_at_once_has_one_bar() -> None:
    events = told(("queued", 1_000), ("running", 1_200, {"worker": "w"}), ("done", 1_700))
    line = timeline(record("done", 1_700), events, now_ms=9_000)
    assert shape(line) == [(1, "done", [("wait", 200), ("run", 500)])]
    assert line.attempts[0].worker == "w"
    assert (line.from_ms, line.to_ms) == (1_000, 1_700)


def test_a_retry_rests_until_it_is_due_and_then_waits() -> None:
    events = told(
        ("queued", 1_000),
        ("running", 1_100),
        ("retry", 1_300, {"due_ms": 2_000}),
        ("running", 2_050),
        ("error", 2_100),
    )
    assert shape(timeline(record("error", 2_100), events, now_ms=9_000)) == [
        (1, "retry", [("wait", 100), ("run", 200)]),
        (2, "failed", [("backoff", 700), ("wait", 50), ("run", 50)]),
    ]


def test_the_words_of_bullmq_tell_the_same_story() -> None:
    events = told(
        ("added", 1_000),
        ("waiting", 1_000),
        ("active", 1_100, {"workerId": "w"}),
        ("progress", 1_200),
        ("delayed", 1_300, {"delay": "2000"}),
        ("waiting", 2_000),
        ("active", 2_010),
        ("completed", 2_020),
    )
    assert shape(timeline(record("completed", 2_020, "bullmq"), events, now_ms=9_000)) == [
        (1, "retry", [("wait", 100), ("run", 200)]),
        (2, "done", [("backoff", 700), ("wait", 10), ("run", 10)]),
    ]


def test_what_goes_on_ends_now() -> None:
    events = told(("queued", 1_000), ("running", 1_500))
    line = timeline(record("running"), events, now_ms=4_000)
    assert shape(line) == [(1, "", [("wait", 500), ("run", 2_500)])]
    assert line.attempts[0].segments[-1].open


def test_a_job_cancelled_before_it_ran_has_no_attempt() -> None:
    line = timeline(
        record("canceled", 3_000), told(("queued", 1_000), ("canceled", 3_000)), now_ms=9
    )
    assert shape(line) == [(0, "cancelled", [("wait", 2_000)])]


def test_a_reopened_job_goes_on_with_the_next_attempt() -> None:
    events = told(
        ("queued", 1_000),
        ("running", 1_100),
        ("done", 1_200),
        ("queued", 5_000),
        ("running", 5_010),
    )
    assert shape(timeline(record("running"), events, now_ms=6_000)) == [
        (1, "done", [("wait", 100), ("run", 100)]),
        (2, "", [("wait", 10), ("run", 990)]),
    ]


def test_without_events_the_record_alone_is_shown_and_said_to_be_partial() -> None:
    assert timeline(record("done", 2_000), [], now_ms=9_000).partial


def pictures() -> Any:
    return templates().get_template("charts.html").module


WORDS = ("queued", "waiting", "active", "running", "retry", "delayed", "done", "failed", "progress")


@given(st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 10_000)), max_size=12))
def test_any_order_of_events_makes_bars_that_can_be_drawn(steps: list[tuple[str, int]]) -> None:
    line = timeline(record("running"), told(*steps), now_ms=20_000)
    assert line.to_ms > line.from_ms
    for attempt in line.attempts:
        assert "<svg" in pictures().bar(attempt, line)


def test_pictures_carry_their_numbers_for_those_who_cannot_see_them() -> None:
    second = Second(1_000)
    second.run[bucket_of(40)] = 3
    assert "3 jobs" in pictures().heat(heat_map([second], "run", now_s=1_001))
    for rows in ([(990.0, 1.0), (1_000.0, 2.0)], []):
        points = sparkline(rows, now_s=1_001)
        assert len(points.split()) == 60
        assert 'aria-label="depth"' in pictures().spark(points, "depth")


def test_of_many_attempts_the_last_are_shown_and_the_others_counted() -> None:
    steps: list[tuple[str, int]] = []
    for n in range(20_000):
        steps += [("running", 2_000 + 2 * n), ("queued", 2_001 + 2 * n)]
    begun = time.process_time()
    line = timeline(record("queued"), told(*steps), now_ms=90_000)
    assert time.process_time() - begun < 5  # it was quadratic: minutes
    assert (line.earlier, len(line.attempts)) == (19_801, 200)
    assert line.total == 20_001
    assert line.attempts[-2].number == 20_000
    assert line.from_ms > 40_000


def test_a_due_time_of_hundreds_of_digits_is_none() -> None:
    events = told(("running", 1_200), ("queued", 1_300, {"due_ms": "9" * 400}))
    line = timeline(record("queued"), events, now_ms=2_000)
    assert line.to_ms == 2_000
