"""What a status asks for, and when a dead receiver is left alone."""

from __future__ import annotations

import pytest

from tenure.core.outcome import Fatal, Retry, Signal
from tenure.webhooks.deliver import CircuitBreaker, signal_of


def asked(status: int, *, attempt: int = 1, **headers: str) -> Signal | None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return signal_of(status, named, attempt=attempt, jitter=1.0, now_s=0.0)


def wait_ms(signal: Signal | None) -> int:
    assert isinstance(signal, Retry)
    assert signal.after_ms is not None
    return signal.after_ms


@pytest.mark.clause("I-49")
@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_any_success_is_a_delivery(status: int) -> None:
    assert asked(status) is None


@pytest.mark.clause("I-49")
@pytest.mark.parametrize(
    "status", [301, 302, 308, 400, 401, 403, 404, 405, 422, 423, 500, 503, 599]
)
def test_every_failure_is_tried_again_later_and_later(status: int) -> None:
    waits = [wait_ms(asked(status, attempt=attempt)) for attempt in range(1, 6)]
    assert waits == [5_000, 20_000, 80_000, 320_000, 1_280_000]


@pytest.mark.clause("I-49")
def test_a_crowded_receiver_waits_in_a_larger_bucket() -> None:
    assert wait_ms(asked(429)) == 60_000 > wait_ms(asked(503))


@pytest.mark.clause("I-49")
def test_a_receiver_that_says_gone_is_not_asked_again() -> None:
    assert isinstance(asked(410), Fatal)


@pytest.mark.clause("I-49")
def test_a_retry_after_is_respected_within_an_hour_and_never_shortens_the_wait() -> None:
    assert wait_ms(asked(503, retry_after="120")) == 120_000
    assert wait_ms(asked(503, retry_after="999999")) == 3_600_000
    assert wait_ms(asked(503, retry_after="1")) == 5_000
    assert wait_ms(asked(503, retry_after="-7")) == 5_000
    assert wait_ms(asked(429, retry_after="Thu, 01 Jan 1970 00:02:00 GMT")) == 120_000


@pytest.mark.clause("I-49")
def test_five_failures_in_a_row_open_the_breaker_and_one_probe_is_let_through() -> None:
    breaker = CircuitBreaker()
    a, b = ("acme", "https://a"), ("acme", "https://b")
    for _ in range(4):
        breaker.record_failure(a, 0.0)
        assert breaker.wait_s(a, 0.0) == 0
    breaker.record_failure(a, 0.0)
    assert breaker.wait_s(a, 0.0) == 10
    assert breaker.wait_s(b, 0.0) == 0, "others are not held up"
    assert breaker.wait_s(a, 10.0) == 0, "this one tries"
    assert breaker.wait_s(a, 10.0) == 10, "and the others wait for it"
    breaker.record_failure(a, 11.0)
    assert breaker.wait_s(a, 12.0) == 19
    breaker.record_success(a)
    assert breaker.wait_s(a, 12.0) == 0
