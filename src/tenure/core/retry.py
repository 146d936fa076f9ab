"""When a failed attempt runs again: policies as data, and `decide_outcome`, which applies them.

All functions are pure. Randomness is the argument `jitter`, from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from tenure.core.encoding import REPLACED, whole_text
from tenure.core.errors import LeaseLost, traceback_of
from tenure.core.lease import Lease
from tenure.core.outcome import (
    Cancel,
    Failure,
    Fatal,
    Outcome,
    OutcomeKind,
    Park,
    RateLimit,
    Retry,
    Signal,
    Snooze,
)

Jitter = Literal["none", "equal", "full"]

_CODE_CHARS_MAX = 80
_MESSAGE_CHARS_MAX = 2_000
# Beyond this exponent every delay is at its cap; 2**attempt would overflow.
_EXPONENT_MAX = 32
_RETRY_AFTER_MS_MAX = 3_600_000


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How often and after which delay a task's failures are tried again.

    `max_attempts` counts starts, so 1 means no retry. `factor` 1 is a fixed delay, 2 doubles it.
    Jitter "equal" spreads over the upper half of the delay, "full" over all of it. `by_error` maps
    an error class name (or its qualified name) to another policy, or to None for "never again".
    """

    max_attempts: int = 3
    delay_ms: int = 1_000
    factor: float = 2.0
    delay_ms_max: int = 600_000
    jitter: Jitter = "equal"
    by_error: Mapping[str, RetryPolicy | None] = {}

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(
                f"max_attempts counts starts and is at least 1, not {self.max_attempts}"
            )
        if self.delay_ms < 0 or self.delay_ms_max < 0 or self.factor < 1:
            raise ValueError("delays cannot be negative and factor is at least 1")


def fixed(delay_ms: int, *, max_attempts: int = 3) -> RetryPolicy:
    """The same delay before every retry."""
    return RetryPolicy(max_attempts=max_attempts, delay_ms=delay_ms, factor=1.0, jitter="none")


def exponential(
    delay_ms: int = 1_000,
    *,
    max_attempts: int = 5,
    factor: float = 2.0,
    delay_ms_max: int = 600_000,
    jitter: Jitter = "equal",
) -> RetryPolicy:
    """A delay that grows by `factor` with every attempt up to `delay_ms_max`."""
    return RetryPolicy(
        max_attempts=max_attempts,
        delay_ms=delay_ms,
        factor=factor,
        delay_ms_max=delay_ms_max,
        jitter=jitter,
    )


NO_RETRY = RetryPolicy(max_attempts=1)


def delay_ms(policy: RetryPolicy, attempt: int, jitter: float) -> int:
    """Milliseconds to wait after failed attempt number `attempt` (1 is the first).

    >>> delay_ms(fixed(500), 3, 0.9)
    500
    >>> delay_ms(exponential(1000, jitter="none"), 4, 0.0)
    8000
    """
    exponent = min(max(attempt, 1) - 1, _EXPONENT_MAX)
    full = min(policy.delay_ms * policy.factor**exponent, float(policy.delay_ms_max))
    match policy.jitter:
        case "none":
            return round(full)
        case "equal":
            return round(full / 2 + full / 2 * jitter)
        case "full":
            return round(full * jitter)


def failure_of(error: BaseException, *, retryable: bool = True) -> Failure:
    """An exception as a failure of bounded size."""
    code = getattr(error, "code", None)
    return _failure(
        code if isinstance(code, str) and code else type(error).__name__,
        _text_of(error),
        traceback_of(error),
        retryable=retryable,
    )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # str() of an error may fail itself
        return f"its text cannot be read: {type(broken).__name__}"


def _failure(code: str, message: str, stack: str = "", *, retryable: bool) -> Failure:
    """A failure that can be written as UTF-8; its message says if characters were replaced."""
    text = whole_text(message[:_MESSAGE_CHARS_MAX])
    if text != message[:_MESSAGE_CHARS_MAX]:
        text += f" ({REPLACED})"
    return Failure(
        code=whole_text(code[:_CODE_CHARS_MAX]),
        message=text,
        stack=whole_text(stack),
        retryable=retryable,
    )


def decide_outcome(
    lease: Lease, error: BaseException, policy: RetryPolicy | None, jitter: float
) -> Outcome:
    """Turn a failed attempt into the outcome to ask the store for.

    Without a policy of the task, the job's own options in the store decide (`fail`): that is what
    the producer of the job expects.
    """
    match error:
        case LeaseLost():
            raise error  # nothing may be written after a lost lease, so there is no outcome
        case Cancel():
            return Outcome(lease, "cancel", failure=_signal_failure(error))
        case Snooze():
            return Outcome(lease, "snooze", delay_ms=error.after_ms)
        case RateLimit():
            return Outcome(lease, "snooze", delay_ms=error.after_ms, until="rate_limit")
        case Park():
            return Outcome(lease, "snooze", until="children")
        case Fatal():
            return Outcome(lease, "bury", failure=_signal_failure(error, retryable=False))
        case Retry():
            return _retry(lease, error, policy, jitter, error.after_ms)
        case _:
            return _by_policy(lease, error, policy, jitter)


def _signal_failure(signal: Signal, *, retryable: bool = True) -> Failure:
    """The failure of a signal: without a stack, or that of its cause if it has one."""
    if signal.__cause__ is not None:
        return failure_of(signal.__cause__, retryable=retryable)
    name = signal.code or type(signal).__name__
    return _failure(name, _text_of(signal), retryable=retryable)


def _retry(
    lease: Lease, error: Retry, policy: RetryPolicy | None, jitter: float, after: int | None
) -> Outcome:
    wait_ms = (
        after if after is not None else delay_ms(policy or RetryPolicy(), lease.attempt, jitter)
    )
    # If neither the job nor the task sets a limit, there is one attempt, as for any failure.
    limit = max(lease.max_attempts, policy.max_attempts if policy else 1)
    kind: OutcomeKind = "bury" if lease.attempt >= limit else "retry"
    return Outcome(lease, kind, failure=_signal_failure(error), delay_ms=wait_ms)


def _by_policy(
    lease: Lease, error: BaseException, policy: RetryPolicy | None, jitter: float
) -> Outcome:
    if policy is None:
        return Outcome(lease, "fail", failure=failure_of(error))
    chosen = _policy_for(policy, error)
    if chosen is None or lease.attempt >= chosen.max_attempts:
        return Outcome(lease, "bury", failure=failure_of(error, retryable=chosen is not None))
    wait_ms = delay_ms(chosen, lease.attempt, jitter)
    return Outcome(lease, "retry", failure=failure_of(error), delay_ms=wait_ms)


def _policy_for(policy: RetryPolicy, error: BaseException) -> RetryPolicy | None:
    """The policy that `by_error` has for the nearest base class of the error, else `policy`."""
    for cls in type(error).__mro__:
        for name in (f"{cls.__module__}.{cls.__qualname__}", cls.__name__):
            if name in policy.by_error:
                return policy.by_error[name]
    return policy


def retry_after_ms(value: str, now_s: float) -> int:
    """Milliseconds to wait by a Retry-After header (a number or a date); 0 without a usable one.

    >>> retry_after_ms("7", 0), retry_after_ms("Thu, 01 Jan 1970 00:00:30 GMT", 10.0)
    (7000, 20000)
    >>> retry_after_ms("soon", 0), retry_after_ms("999999", 0), retry_after_ms("nan", 0)
    (0, 3600000, 0)
    """
    import email.utils  # not above: few processes need it, and it is slow to load

    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now_s
        except (ValueError, OverflowError):
            return 0
    return round(min(seconds * 1000, _RETRY_AFTER_MS_MAX)) if seconds > 0 else 0
