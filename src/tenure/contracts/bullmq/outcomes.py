"""How an outcome is asked of the store, and what its answer means.

BullMQ lets the worker decide whether a failed job runs again, by the job's own options; that
decision is made here, where the options are, and the script carries it out.
"""

from __future__ import annotations

from typing import Any

from tenure.contracts.bullmq.claimed import Claimed
from tenure.contracts.bullmq.job_options import JobOptions, Keep, backoff_ms, stack_of
from tenure.contracts.bullmq.options import Options
from tenure.core.errors import LeaseLost
from tenure.core.job import short_hash
from tenure.core.lease import Lease
from tenure.core.outcome import (
    BURIED,
    CANCELLED,
    COMPLETED,
    RELEASED,
    Failure,
    Outcome,
    Retried,
    Verdict,
)
from tenure.store.redis import Arg

_VERDICTS: dict[bytes, Verdict] = {
    b"complete": COMPLETED,
    b"bury": BURIED,
    b"release": RELEASED,
    b"cancel": CANCELLED,
}
_NO_OPTIONS = JobOptions()


def settle_args(outcome: Outcome, options: Options, token_h: str) -> tuple[Arg, ...]:
    """The seventeen arguments of one outcome, in the order of settle-16.lua."""
    lease = outcome.lease
    claimed = lease.extra if isinstance(lease.extra, Claimed) else None
    told = claimed.options if claimed else _NO_OPTIONS
    attempts = told.attempts or options.max_attempts
    last = lease.attempt >= (lease.max_attempts or 1)
    otherwise = "bury" if last else "retry"
    if outcome.kind == "complete":
        keep = told.keep_completed or kept_by(options.keep_completed, options.keep_completed_s)
        result = outcome.result
        return (
            lease.job_id, lease.fence, lease.token, "complete", result, "", short_hash(result), "",
            backoff_ms(told.backoff, _made(lease)), *keep_args(keep), attempts, lease.max_attempts,
            token_h, otherwise, "",
        )  # fmt: skip
    failure = outcome.failure
    kind, wait_ms = _decide(outcome, told, last)
    keep = told.keep_failed or kept_by(options.keep_failed, options.keep_failed_s)
    reason = failure.message or failure.code if failure else ""
    unknown = custom_backoff(lease) if outcome.kind == "fail" and not last else None
    if unknown:
        reason = (
            f"Unknown backoff strategy {unknown[0]}: a task of the worker says how long to wait, "
            f"by @task(..., backoff=function). The attempt failed with: {reason}"
        )
    stack = b""
    if failure and kind in ("retry", "bury"):
        earlier = claimed.stacktrace if claimed else b""
        stack = stack_of(earlier, _stack(failure, reason), told.stack_trace_limit)
    return (
        lease.job_id, lease.fence, lease.token, kind, reason, stack, "", _code(failure), wait_ms,
        *keep_args(keep), attempts, lease.max_attempts, token_h, otherwise,
        "1" if told.lifo else "",
    )  # fmt: skip


def custom_backoff(lease: Lease) -> tuple[str, int] | None:
    """The type of a backoff that BullMQ leaves to the worker, and the attempts made by now."""
    told = lease.extra.options.backoff if isinstance(lease.extra, Claimed) else None
    kind = told.get("type") if isinstance(told, dict) else None
    return None if kind in (None, "fixed", "exponential") else (str(kind), _made(lease))


def _decide(outcome: Outcome, told: JobOptions, last: bool) -> tuple[str, int]:
    lease, kind = outcome.lease, outcome.kind
    if kind == "fail":
        if last or custom_backoff(lease):
            return "bury", 0
        wait_ms = outcome.delay_ms or backoff_ms(told.backoff, _made(lease))
        return "retry", wait_ms
    if kind == "retry" and lease.max_attempts and last:
        return "bury", 0
    if outcome.until == "children":
        return "park", backoff_ms(told.backoff, _made(lease))
    return "limit" if outcome.until == "rest" else kind, outcome.delay_ms


def _stack(failure: Failure, reason: str) -> str:
    """An entry as Node's readers show it: it names the error, wherever the stack came from."""
    if failure.code in failure.stack:
        return failure.stack
    return f"{failure.code}: {reason}" + (f"\n{failure.stack}" if failure.stack else "")


def _made(lease: Lease) -> int:
    """Attempts made when this one has failed; starts that stalled are none."""
    stalled = lease.extra.stalled if isinstance(lease.extra, Claimed) else 0
    return lease.attempt - stalled


def verdict_of(lease: Lease, reply: list[Any]) -> Verdict:
    """What the store decided."""
    code = reply[0]
    if code == b"lost":
        return LeaseLost(lease.job_id, reply[1].decode())
    if code == b"retry":
        return Retried(reply[1])
    return _VERDICTS[code]


def kept_by(count: int, age_s: int) -> Keep:
    """What a worker keeps of jobs that say nothing themselves."""
    return Keep(count if count >= 0 else None, age_s or None)


def keep_args(keep: Keep) -> tuple[Arg, Arg, Arg]:
    """Count, age and limit as the scripts take them."""
    count, age_s, limit = ("" if n is None else n for n in (keep.count, keep.age_s, keep.limit))
    return count, age_s, limit


def _code(failure: Failure | None) -> str:
    """The error code as the journal takes it: one short word without separators."""
    return "" if failure is None else "".join(failure.code.split())[:80]
