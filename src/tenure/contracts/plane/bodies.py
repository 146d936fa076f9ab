"""Bodies of the workers' verbs, to and from what the plane works with."""

from __future__ import annotations

from typing import Any

import msgspec

from tenure.contracts.plane.shapes import (
    ClaimedJob,
    CompletedJob,
    Error,
    FailedJob,
    Kept,
    ReportedNews,
    StreamRef,
    moment,
)
from tenure.contracts.plane.words import attempt_id_of, fence_of
from tenure.core.endpoint import Refused
from tenure.core.errors import LeaseLost, UsageError
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Failure, Outcome


def claimed(lease: Lease, ttl_s: float, shape: type[ClaimedJob] = ClaimedJob) -> ClaimedJob:
    """A lease as it is answered."""
    return shape(
        job_id=lease.job_id,
        attempt_id=attempt_id_of(lease.job_id, lease.fence),
        lease_token=lease.token,
        stream=StreamRef(name=lease.queue, message_id=lease.handle),
        payload=msgspec.Raw(lease.payload),
        lease_ttl_seconds=ttl_s,
        heartbeat_interval_seconds=round(ttl_s / 3, 3),
        task=lease.task,
        attempt=lease.attempt,
        max_attempts=lease.max_attempts,
        fence=lease.fence,
        lease_expires_at=moment(lease.lease_until_ms),
        lease_expires_at_ms=lease.lease_until_ms,
        lease_remaining_ms=lease.lease_ms,
        created_ms=lease.created_ms,
        gid=lease.gid,
        priority=lease.priority,
        trace=lease.trace,
    )


def kept(answer: Lease | LeaseLost) -> Kept:
    """An extend as it is answered."""
    if isinstance(answer, LeaseLost):
        return Kept(ok=False, reason=answer.reason)
    return Kept(
        ok=True,
        lease_expires_at=moment(answer.lease_until_ms),
        lease_expires_at_ms=answer.lease_until_ms,
        lease_remaining_ms=answer.lease_ms,
        cancel_requested=answer.cancel_requested,
    )


def single(asked: Any, shape: Any) -> Any:
    """The contract's single form as an item of the batch form."""
    return shape(**{name: getattr(asked, name) for name in shape.__struct_fields__})


def require(asked: Any, *names: str) -> None:
    """Refuse a single form that lacks one of these."""
    for name in names:
        if not getattr(asked, name):
            raise Refused("invalid", f"{name} is missing", field=name)


def stream_and_message(given: str | StreamRef) -> tuple[str, str]:
    """Both ways in which a body names its stream; the message may be unnamed."""
    return (given, "") if isinstance(given, str) else (given.name, given.message_id)


def completed(job: CompletedJob) -> Outcome:
    """The outcome of a result."""
    return Outcome(lease_of(job, job.message_id), "complete", text(job.result))


def failed(job: FailedJob) -> Outcome:
    """The outcome of any other end."""
    error = job.error
    if error is None and job.kind in ("fail", "retry", "bury"):
        error = Error(code=job.kind)
    failure = None
    if error is not None:
        failure = Failure(
            code=error.code, message=error.message, stack=error.stack, retryable=error.retryable
        )
    lease = lease_of(job, job.message_id)
    return Outcome(lease, job.kind, failure=failure, delay_ms=job.delay_ms)


def reported(news: ReportedNews) -> Report:
    """News of an attempt."""
    return Report(
        lease=lease_of(news, ""),
        type=news.type,
        step=news.step,
        data=text(news.data),
        progress=text(news.progress),
    )


def text(raw: msgspec.Raw) -> bytes:
    """The bytes of a part that was not decoded; refused when they are no text."""
    value = bytes(raw)
    try:
        value.decode()
    except UnicodeDecodeError as error:
        raise Refused("bad_json", f"the body is not UTF-8: {error}") from None
    return value


def lease_of(job: Any, message_id: str) -> Lease:
    """The lease under which something is sent; refused when it cannot be one."""
    stream, inner_id = stream_and_message(job.stream)
    if not stream:
        raise Refused("invalid", "stream is missing", field="stream")
    try:
        fence = fence_of(job.job_id, job.attempt_id)
    except UsageError as error:
        raise Refused("invalid", str(error), field="attempt_id") from None
    return named(job.job_id, fence, job.lease_token, stream, message_id or inner_id)


def named(job_id: str, fence: int, token: str, stream: str, handle: str = "") -> Lease:
    """A lease as its holder names it; what it does not say matters to nobody."""
    return Lease(
        job_id=job_id,
        queue=stream,
        task="",
        payload=b"",
        attempt=fence,
        max_attempts=0,
        fence=fence,
        token=token,
        lease_until_ms=0,
        lease_ms=0,
        handle=handle,
    )
