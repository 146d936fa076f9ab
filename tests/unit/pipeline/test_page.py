"""The page of the report: the verdict first, and readable at an hour and at a year of data."""

from __future__ import annotations

from typing import Any

import pytest

from tenure.pipeline.audit.run import Audited, Verdict
from tenure.pipeline.report.figures import Figures
from tenure.pipeline.report.page import lines, page

HOUR_MS = 3_600_000
BEGAN_MS = 1_760_000_400_000


def verdict(number: str, *, violations: int = 0, unobserved: int = 0) -> Verdict:
    return Verdict(
        invariant=number, text=f"promise {number}", contracts="all", jobs=9,
        violations=violations, unobserved=unobserved,
    )  # fmt: skip


def figures(hours: int, *verdicts: Verdict) -> Figures:
    """A queue that worked for so many hours."""
    times = [BEGAN_MS + n * HOUR_MS for n in range(hours)]
    counts: dict[str, Any] = {"submitted": 5, "completed": 4, "failed": 1, "lost": 0}
    audit = Audited(
        events=9, jobs=9, open_jobs=0, begins_late=0, looked_at=0, verdicts=list(verdicts)
    )
    return Figures(
        lake="lake", events=9, journals=1, jobs=9, dead=1,
        by_hour=[{"hour_ms": at, "contract": "streams", "queue": "q", **counts} for at in times],
        latency=[
            {"hour_ms": at, "kind": kind, "bucket": bucket, "count": 3}
            for at in times for kind in ("wait", "total") for bucket in (4, 9)
        ],
        causes=[], tasks=[], workers=[],
        slo=[
            {"day": f"2025-{1 + n // 28:02}-{1 + n % 28:02}", "contract": "streams", "queue": "q",
             "target_ms": 60_000, "finished": 9, "within": 9, "share": 1.0}
            for n in range(max(1, hours // 24 * 9 // 10))
        ],
        audit=audit, violations=[], gaps=[],
    )  # fmt: skip


def test_a_time_after_the_last_year_of_the_calendar_is_drawn() -> None:
    assert "31 Dec 23:59 UTC" in lines({"jobs": [(0, 1.0), (10**17, 2.0)]}, unit="")


def test_one_hour_of_data_is_drawn_as_points_and_cells() -> None:
    text = page(figures(1, verdict("I4")))
    assert "Throughput: jobs per hour" in text
    assert text.count("<circle") == 3
    assert text.count("<rect") == 4
    assert "5 jobs were submitted, 4 succeeded, 1 failed for good." in text
    assert "Half took less than 32 ms, 99% less than 1 s." in text


@pytest.mark.parametrize(("days", "each"), [(10, "hour"), (300, "day"), (365 * 4, "week")])
def test_a_long_time_has_no_more_points_than_a_reader_can_see(days: int, each: str) -> None:
    text = page(figures(24 * days, verdict("I4")))
    assert f"Throughput: jobs per {each}" in text
    assert text.count("<rect") <= 2 * 2 * (24 * 14 + 1)
    assert len(text) < 200_000
    assert text.count("<td>streams q</td>") <= 31
    assert f"{24 * days * 5:,} jobs were submitted" in text


def test_the_verdict_comes_first_and_what_is_not_judged_is_apart() -> None:
    text = page(figures(1, verdict("I4"), verdict("I28", unobserved=9)))
    said = text.partition("<svg")[0]
    assert "No promise was broken in 9 jobs that were judged." in said
    assert "No gaps" in said
    assert "100.0% of the jobs of q ended well within 1 min" in said
    judged, _, apart = text.partition("Not judged here")
    assert "promise I4" in judged
    assert "promise I28" in apart
    assert "promise I28" not in judged
    broken = page(figures(1, verdict("I4", violations=2)))
    assert "Broken: I4, 2 times in 9 jobs." in broken.partition("<svg")[0]
