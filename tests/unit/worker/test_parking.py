"""Signals that not every queue can follow."""

from __future__ import annotations

import pytest

from tenure.core.lease import Lease
from tenure.core.outcome import Park, RateLimit
from tenure.core.retry import decide_outcome
from tenure.worker.settle import no_children_outcome

LEASE = Lease(
    job_id="1", queue="q", task="t", payload=b"{}", attempt=1, max_attempts=3, fence=1, token="t",
    lease_until_ms=1, lease_ms=1,
)  # fmt: skip


def test_a_rate_limit_is_a_snooze_that_says_that_the_queue_shall_rest() -> None:
    outcome = decide_outcome(LEASE, RateLimit(1.5), None, 0.5)
    assert (outcome.kind, outcome.delay_ms, outcome.until) == ("snooze", 1_500, "rate_limit")
    with pytest.raises(ValueError, match="negative"):
        RateLimit(-1)


def test_a_parked_job_is_snoozed_until_its_children_have_ended() -> None:
    outcome = decide_outcome(LEASE, Park(), None, 0.5)
    assert (outcome.kind, outcome.until, outcome.failure) == ("snooze", "children", None)


def test_parking_where_jobs_have_no_children_is_a_failure_that_says_so() -> None:
    outcome = no_children_outcome(LEASE)
    assert outcome.kind == "bury"
    assert outcome.failure is not None
    assert "no children" in outcome.failure.message
