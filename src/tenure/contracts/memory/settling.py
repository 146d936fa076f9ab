"""What an outcome makes of a lease (M-15 to M-18): one arm per kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_never

import msgspec

from tenure.contracts.memory.contents import Contents
from tenure.contracts.memory.stored import Closed, StoredJob
from tenure.core.idempotency import request_hash, short_hash
from tenure.core.outcome import (
    BURIED,
    CANCELLED,
    COMPLETED,
    RELEASED,
    Outcome,
    Retried,
    Verdict,
)

# How many ended leases of one job can still be answered when their settle is resent.
CLOSED_MAX = 32


@dataclass(frozen=True, slots=True)
class Closing:
    """The identity of a settle: which lease it ends, and a hash of what it asks for."""

    fence: int
    token: str
    outcome_h: str

    @classmethod
    def of(cls, outcome: Outcome) -> Closing:
        failure = outcome.failure
        what = [failure.code, failure.message] if failure else None
        asked = (outcome.kind, short_hash(outcome.result), what, outcome.delay_ms)
        return cls(outcome.lease.fence, outcome.lease.token, request_hash(*asked))

    def verdict_of(self, job: StoredJob) -> Verdict | None:
        """What this same settle got before, if this lease ended with it."""
        closed = job.closed.get(self.fence)
        same = closed is not None and (closed.token, closed.outcome_h) == (
            self.token,
            self.outcome_h,
        )
        return closed.verdict if closed is not None and same else None

    def keep(self, job: StoredJob, verdict: Verdict) -> None:
        """Remember the verdict for a resent settle."""
        job.closed[self.fence] = Closed(self.token, self.outcome_h, verdict)
        if len(job.closed) > CLOSED_MAX:
            del job.closed[min(job.closed)]


def apply(contents: Contents, job: StoredJob, outcome: Outcome) -> Verdict:
    """End the lease of a running job as the outcome asks, as far as the rules allow."""
    kind = outcome.kind
    if job.cancel_requested and kind in ("fail", "retry", "snooze", "release"):
        kind = "cancel"  # M-18: what somebody wants ended does not go back into the line
    match kind:
        case "complete":
            left = {"result": outcome.result, "result_h": short_hash(outcome.result)}
            contents.finish(job, "complete", "done", by=outcome.lease.token, **left)
            return COMPLETED
        case "fail" | "retry":
            return _again_or_bury(contents, job, outcome)
        case "bury":
            return _bury(contents, job, outcome)
        case "snooze":
            return _snooze(contents, job, outcome)
        case "release":
            return _release(contents, job, outcome)
        case "cancel":
            contents.finish(job, "cancel", "cancelled", **_failed(outcome))
            return CANCELLED
        case _:
            assert_never(kind)


def _again_or_bury(contents: Contents, job: StoredJob, outcome: Outcome) -> Verdict:
    final = outcome.kind == "fail" and outcome.failure is not None and not outcome.failure.retryable
    if final or job.attempt >= job.max_attempts:
        return _bury(contents, job, outcome)
    delay_ms = job.retry_delay_ms if outcome.kind == "fail" else outcome.delay_ms
    return _put_back(contents, job, "retry", delay_ms, **_failed(outcome))


def _snooze(contents: Contents, job: StoredJob, outcome: Outcome) -> Verdict:
    left = {"by": outcome.lease.token, "attempt": job.attempt - 1}
    return _put_back(contents, job, "snooze", outcome.delay_ms, **left)


def _put_back(contents: Contents, job: StoredJob, kind: str, delay_ms: int, **left: Any) -> Verdict:
    """Into the line at its end, or aside until due."""
    due_ms = contents.now_ms() + delay_ms if delay_ms > 0 else 0
    contents.put_back(job, kind, due_ms=due_ms, **left)
    contents.line.append(job)
    return Retried(due_ms)


def _release(contents: Contents, job: StoredJob, outcome: Outcome) -> Verdict:
    """Back to its old turn; the fence stays, so that the old lease can never speak again."""
    contents.put_back(job, "release", by=outcome.lease.token, attempt=job.attempt - 1)
    contents.line.insert(job)
    return RELEASED


def _bury(contents: Contents, job: StoredJob, outcome: Outcome) -> Verdict:
    contents.finish(job, "bury", "failed", **_failed(outcome))
    return BURIED


def _failed(outcome: Outcome) -> dict[str, Any]:
    failure = outcome.failure
    error = msgspec.json.encode(failure) if failure else b""
    code = failure.code if failure else ""
    return {"by": outcome.lease.token, "error": error, "error_code": code}
