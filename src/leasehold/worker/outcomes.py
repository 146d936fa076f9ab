"""What a handler's end becomes: the part of judging that is the worker's own.

Which failures are tried again is decided by `core.retry.judge`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from leasehold.core.errors import LeaseholdError
from leasehold.core.lease import Lease
from leasehold.core.outcome import Failure, Outcome
from leasehold.core.retry import failure_of
from leasehold.worker.holding import Attempt

_encode = msgspec.json.Encoder().encode
_MESSAGE_CHARS_MAX = 2_000


class TimedOut(LeaseholdError):
    """The handler took longer than its task allows."""

    code = "timeout"


class ProcessDied(LeaseholdError):
    """The child process ended before the handler did: killed, out of memory, or a crash."""

    code = "process_died"


def completed(lease: Lease, value: Any) -> Outcome:
    """The outcome of a handler that returned. A value that is not JSON buries the job:

    the work is done, and doing it again would end the same way.
    """
    if value is None:
        return Outcome(lease, "complete")
    try:
        return Outcome(lease, "complete", _encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        message = f"the handler returned {type(value).__name__}, which is not JSON: {error}"
        failure = Failure(
            code="result_not_json", message=message[:_MESSAGE_CHARS_MAX], retryable=False
        )
        return Outcome(lease, "bury", failure=failure)


def backed_off(attempt: Attempt, outcome: Outcome, error: BaseException) -> Outcome:
    """A failure whose job names a backoff that its queue does not know: the task's function says
    how long to wait, or that the job is given up (-1). One that raises gives it up as well."""
    lease, task = outcome.lease, attempt.task
    named = attempt.source.custom_backoff(lease)
    if named is None or task is None or task.backoff is None:
        return outcome
    if lease.attempt >= (lease.max_attempts or 1):
        return outcome
    kind, attempts_made = named
    try:
        delay_ms = int(task.backoff(attempts_made, kind, error, attempt.job))
    except Exception as broken:
        return Outcome(lease, "bury", failure=failure_of(broken, retryable=False))
    if delay_ms < 0:
        return Outcome(lease, "bury", failure=outcome.failure)
    return Outcome(lease, "retry", failure=outcome.failure, delay_ms=delay_ms)


def childless(lease: Lease) -> Outcome:
    """The handler wants to wait for children in a queue whose jobs have none."""
    message = "the handler parked its job, but jobs of this queue have no children to wait for"
    failure = Failure(code="no_children", message=message, retryable=False)
    return Outcome(lease, "bury", failure=failure)


def cancelled(lease: Lease) -> Outcome:
    """Somebody asked for it, and the handler has been stopped."""
    failure = Failure(code="cancelled", message="cancelled on request")
    return Outcome(lease, "cancel", failure=failure)


def released(lease: Lease) -> Outcome:
    """The worker stops: anyone may have the job at once."""
    return Outcome(lease, "release")
