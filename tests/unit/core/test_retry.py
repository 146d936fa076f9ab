"""Retry policies: delays with their caps and jitter, and `decide_outcome` for every way to fail."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.core.errors import LeaseLost, StoreError, UnknownTask
from tenure.core.lease import Lease
from tenure.core.outcome import Cancel, Fatal, Outcome, Retry, Snooze
from tenure.core.retry import (
    NO_RETRY,
    RetryPolicy,
    decide_outcome,
    delay_ms,
    exponential,
    failure_of,
    fixed,
)

policies = st.builds(
    RetryPolicy,
    max_attempts=st.integers(1, 50),
    delay_ms=st.integers(0, 100_000),
    factor=st.floats(1, 10),
    delay_ms_max=st.integers(0, 1_000_000),
    jitter=st.sampled_from(["none", "equal", "full"]),
)
chances = st.floats(0, 1, exclude_max=True)


def lease(attempt: int = 1, max_attempts: int = 0) -> Lease:
    return Lease(
        job_id="j1",
        queue="q",
        task="t",
        payload=b"{}",
        attempt=attempt,
        max_attempts=max_attempts,
        fence=attempt,
        token="t",
        lease_until_ms=1,
        lease_ms=1,
    )


# --- delays ----------------------------------------------------------------------------------


@given(policy=policies, attempt=st.integers(-3, 10_000), jitter=chances)
def test_a_delay_is_never_negative_and_never_above_its_cap(
    policy: RetryPolicy, attempt: int, jitter: float
) -> None:
    assert 0 <= delay_ms(policy, attempt, jitter) <= policy.delay_ms_max


@given(policy=policies, attempt=st.integers(1, 40), jitter=chances)
def test_jitter_only_ever_shortens_the_delay(
    policy: RetryPolicy, attempt: int, jitter: float
) -> None:
    plain = RetryPolicy(
        delay_ms=policy.delay_ms,
        factor=policy.factor,
        delay_ms_max=policy.delay_ms_max,
        jitter="none",
    )
    full = delay_ms(plain, attempt, jitter)
    drawn = delay_ms(policy, attempt, jitter)
    assert drawn <= full
    if policy.jitter == "equal":
        assert drawn >= full // 2


@given(policy=policies, attempt=st.integers(1, 40))
def test_without_jitter_delays_never_shrink(policy: RetryPolicy, attempt: int) -> None:
    plain = RetryPolicy(
        delay_ms=policy.delay_ms,
        factor=policy.factor,
        delay_ms_max=policy.delay_ms_max,
        jitter="none",
    )
    assert delay_ms(plain, attempt, 0) <= delay_ms(plain, attempt + 1, 0)


def test_an_exponential_delay_doubles_up_to_its_cap() -> None:
    policy = exponential(100, jitter="none", delay_ms_max=1_000)
    assert [delay_ms(policy, attempt, 0.5) for attempt in range(1, 7)] == [
        *(100, 200, 400, 800, 1_000, 1_000)
    ]


def test_jitter_spreads_over_half_or_all_of_the_delay() -> None:
    equal, full = exponential(1_000, jitter="equal"), exponential(1_000, jitter="full")
    assert [delay_ms(equal, 1, jitter) for jitter in (0, 0.5, 0.999)] == [500, 750, 1_000]
    assert [delay_ms(full, 1, jitter) for jitter in (0, 0.5, 0.999)] == [0, 500, 999]


def test_an_absurd_attempt_number_does_not_overflow() -> None:
    assert delay_ms(exponential(1_000, factor=10.0, jitter="none"), 10**9, 0) == 600_000


@pytest.mark.parametrize(
    "wrong",
    [{"max_attempts": 0}, {"delay_ms": -1}, {"delay_ms_max": -1}, {"factor": 0.5}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|negative"):
        RetryPolicy(**wrong)


# --- decide_outcome ----------------------------------------------------------------------


def test_a_lost_lease_has_no_outcome() -> None:
    """Nothing may be written any more."""
    with pytest.raises(LeaseLost):
        decide_outcome(lease(), LeaseLost("j1"), fixed(10), 0)


def test_cancel_and_fatal_end_the_job_whatever_the_policy() -> None:
    for policy in (None, fixed(10, max_attempts=99)):
        cancelled = decide_outcome(lease(), Cancel("enough"), policy, 0)
        fatal = decide_outcome(lease(), Fatal("no use"), policy, 0)
        assert (cancelled.kind, fatal.kind) == ("cancel", "bury")
        assert cancelled.failure is not None
        assert fatal.failure is not None
        assert (cancelled.failure.message, fatal.failure.message) == ("enough", "no use")
        assert not fatal.failure.retryable


def test_snooze_keeps_its_delay_and_carries_no_failure() -> None:
    for after in (2, 2.0, timedelta(seconds=2)):
        assert decide_outcome(lease(), Snooze(after), None, 0) == Outcome(
            lease(), "snooze", delay_ms=2_000
        )


def test_retry_after_keeps_its_delay_and_its_limit() -> None:
    asked = decide_outcome(lease(1, 3), Retry(after=1.5, reason="busy"), fixed(10), 0)
    assert (asked.kind, asked.delay_ms) == ("retry", 1_500)
    assert asked.failure is not None
    assert asked.failure.message == "busy"
    assert (
        decide_outcome(lease(3, 3), Retry(after=1.5), fixed(10, max_attempts=3), 0).kind == "bury"
    )


def test_retry_without_a_time_follows_the_policy() -> None:
    assert decide_outcome(lease(2), Retry(), exponential(100, jitter="none"), 0).delay_ms == 200
    assert decide_outcome(lease(1, 2), Retry(), None, 0).kind == "retry"


def test_retry_of_a_job_that_names_no_attempts_and_has_no_policy_gives_it_up() -> None:
    assert decide_outcome(lease(1, 0), Retry(after=0), None, 0).kind == "bury"
    assert decide_outcome(lease(1, 0), Retry(after=0), fixed(10, max_attempts=2), 0).kind == "retry"


def test_without_a_policy_the_store_decides() -> None:
    outcome = decide_outcome(lease(), ValueError("no"), None, 0)
    assert outcome.kind == "fail"
    assert outcome.failure is not None
    assert (outcome.failure.code, outcome.failure.message) == ("ValueError", "no")
    assert "ValueError: no" in outcome.failure.stack


def test_a_code_of_any_length_is_stored_short() -> None:
    outcome = decide_outcome(lease(), Fatal("no", code="c" * 1_000), None, 0)
    assert outcome.failure is not None
    assert outcome.failure.code == "c" * 80


def test_a_policy_counts_starts() -> None:
    policy = fixed(500, max_attempts=3)
    kinds = [decide_outcome(lease(attempt), OSError(), policy, 0).kind for attempt in (1, 2, 3, 4)]
    assert kinds == ["retry", "retry", "bury", "bury"]
    assert decide_outcome(lease(1), OSError(), NO_RETRY, 0).kind == "bury"


def test_an_error_class_may_have_a_policy_of_its_own() -> None:
    policy = RetryPolicy(
        max_attempts=2,
        delay_ms=10,
        jitter="none",
        by_error={
            "ConnectionError": fixed(7_000, max_attempts=9),
            "builtins.ValueError": None,
            "StoreError": fixed(1),
        },
    )
    assert decide_outcome(lease(5), ConnectionResetError(), policy, 0).delay_ms == 7_000
    assert decide_outcome(lease(1), StoreError("away"), policy, 0).delay_ms == 1
    never = decide_outcome(lease(1), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), policy, 0)
    assert never.kind == "bury"
    assert never.failure is not None
    assert not never.failure.retryable
    assert decide_outcome(lease(1), KeyError(), policy, 0).delay_ms == 10


def test_the_nearest_named_class_decides() -> None:
    policy = RetryPolicy(by_error={"OSError": None, "TimeoutError": fixed(3)})
    assert decide_outcome(lease(1), TimeoutError(), policy, 0).delay_ms == 3
    assert decide_outcome(lease(1), FileNotFoundError(), policy, 0).kind == "bury"


@given(policy=st.none() | policies, attempt=st.integers(1, 60), jitter=chances)
def test_every_error_gets_an_outcome_that_the_store_understands(
    policy: RetryPolicy | None, attempt: int, jitter: float
) -> None:
    outcome = decide_outcome(lease(attempt), RuntimeError("x"), policy, jitter)
    assert outcome.kind in ("fail", "retry", "bury")
    assert outcome.failure is not None
    assert outcome.delay_ms >= 0
    if policy is not None:
        assert (outcome.kind == "bury") == (attempt >= policy.max_attempts)


# --- what is kept of an error ----------------------------------------------------------------


def test_a_failure_is_cut_to_a_bounded_size() -> None:
    failure = failure_of(ValueError("x" * 100_000))
    assert len(failure.message) <= 2_000
    assert len(failure.stack) <= 8_000


def test_an_error_with_a_code_keeps_it() -> None:
    assert failure_of(UnknownTask("no handler")).code == "unknown_task"
    assert failure_of(KeyError("k")).code == "KeyError"


def test_a_signal_tells_its_cause_when_it_has_one() -> None:
    signal = Fatal("giving up")
    signal.__cause__ = ValueError("the real reason")
    failure = decide_outcome(lease(), signal, None, 0).failure
    assert failure is not None
    assert (failure.code, failure.message) == ("ValueError", "the real reason")


@pytest.mark.parametrize("signal", [Retry, Snooze])
def test_a_signal_with_a_negative_delay_is_refused(signal: Any) -> None:
    with pytest.raises(ValueError, match="negative"):
        signal(-1)
