"""The JSON bodies of the HTTP API, and their conversion to and from the types of the seam.

Fields after a comment `# ours` are not of the contract.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tenure.contracts.plane.model import attempt_id_of, fence_of
from tenure.core.encoding import TIME_MS_MAX, answer_json
from tenure.core.endpoint import Refused
from tenure.core.errors import LeaseLost, UsageError
from tenure.core.job import JobRecord, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Failure, Outcome
from tenure.core.portable import State, state_of

BATCH_MAX = 500
BODY_BYTES_MAX = 1 << 20
_TEXT_MAX = 512
_DELAY_MS_MAX = 30 * 24 * 3600 * 1000

_Id = Annotated[str, Meta(min_length=1, max_length=_TEXT_MAX)]
_Name = Annotated[str, Meta(max_length=_TEXT_MAX)]
_StreamName = Annotated[str, Meta(max_length=100, description="A stream of this plane.")]
_WaitMs = Annotated[int, Meta(ge=0, le=3_600_000, description="How long to wait for a job.")]
_DelayMs = Annotated[int, Meta(ge=0, le=_DELAY_MS_MAX)]
_Integer = Annotated[int, Meta(ge=-(2**53), le=2**53)]
_Kind = Literal["fail", "retry", "bury", "snooze", "release", "cancel"]


class RequestBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all request bodies: a misspelt field is refused, not ignored."""


class StreamRef(RequestBody, frozen=True):
    """Where a job's message is."""

    name: _StreamName
    message_id: _Name = ""


class ClaimRequest(RequestBody, frozen=True):
    """Asks for work. `streams` are tried in this order; an empty list means all of the plane."""

    worker_id: _Id
    streams: Annotated[list[_StreamName], Meta(max_length=100)] = []
    max_wait_ms: _WaitMs = 0
    # ours
    claim_id: _Name = ""
    max_jobs: Annotated[int, Meta(ge=0, le=BATCH_MAX)] = 0
    fresh: bool = False
    lost: Annotated[list[_Name], Meta(max_length=20)] = []


class ClaimedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One lease. Times in milliseconds are of the database's clock."""

    job_id: str
    attempt_id: str
    lease_token: str
    stream: StreamRef
    payload: msgspec.Raw
    lease_ttl_seconds: float
    heartbeat_interval_seconds: float
    # ours
    task: str
    attempt: int
    max_attempts: int
    fence: int
    lease_expires_at: str
    lease_expires_at_ms: int
    lease_remaining_ms: int
    created_ms: int = 0
    gid: str = ""
    priority: int = 0
    trace: str = ""
    ttl_ms: int = 0


class ClaimResult(ClaimedJob, frozen=True, kw_only=True):
    """The answer to a claim that found a job."""

    claimed: bool = True


class EmptyClaimResult(msgspec.Struct, frozen=True):
    """The answer to a claim that found no job."""

    claimed: bool = False


class ClaimResults(msgspec.Struct, frozen=True):
    """The answer to a claim with `max_jobs`."""

    claimed: bool
    jobs: list[ClaimedJob]


class LeaseRef(RequestBody, frozen=True):
    """A lease as its holder identifies it."""

    job_id: _Id
    lease_token: _Name
    # ours: if both are given, the plane does not look them up
    attempt_id: _Name = ""
    stream: _StreamName | StreamRef = ""


class HeartbeatRequest(RequestBody, frozen=True):
    """Extends a lease, or all of `leases`."""

    worker_id: _Id
    job_id: _Name = ""
    lease_token: _Name = ""
    # ours
    attempt_id: _Name = ""
    stream: _StreamName | StreamRef = ""
    leases: Annotated[list[LeaseRef], Meta(max_length=BATCH_MAX)] | None = None
    if_short: Annotated[
        bool, Meta(description="Extend only leases of which less than two thirds are left.")
    ] = False


class HeartbeatResult(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the lease is still held, and until when; `lease_remaining_ms` needs no clock."""

    ok: bool
    lease_expires_at: str | None = None
    # ours
    lease_expires_at_ms: int = 0
    lease_remaining_ms: int = 0
    cancel_requested: bool = False
    reason: str = ""


class CompletedJob(RequestBody, frozen=True):
    """An attempt that succeeded."""

    job_id: _Id
    attempt_id: _Id
    lease_token: _Name
    stream: _StreamName | StreamRef
    message_id: _Name = ""
    result: msgspec.Raw = msgspec.field(default_factory=partial(msgspec.Raw, b"null"))


class CompleteRequest(RequestBody, frozen=True):
    """Ends an attempt with its result, or all of `jobs`."""

    worker_id: _Id
    job_id: _Name = ""
    attempt_id: _Name = ""
    lease_token: _Name = ""
    stream: _StreamName | StreamRef = ""
    message_id: _Name = ""
    result: msgspec.Raw = msgspec.field(default_factory=partial(msgspec.Raw, b"null"))
    # ours
    jobs: Annotated[list[CompletedJob], Meta(max_length=BATCH_MAX)] | None = None


class Error(RequestBody, frozen=True):
    """Why an attempt failed."""

    code: str = "error"
    message: str = ""
    stack: str = ""
    retryable: bool = True


class FailedJob(RequestBody, frozen=True):
    """An attempt that did not succeed. `kind` says what shall become of its job."""

    job_id: _Id
    attempt_id: _Id
    lease_token: _Name
    stream: _StreamName | StreamRef
    message_id: _Name = ""
    error: Error | None = None
    # ours
    kind: _Kind = "fail"
    delay_ms: _DelayMs = 0


class FailRequest(RequestBody, frozen=True):
    """Ends an attempt that did not succeed, or all of `jobs`."""

    worker_id: _Id
    job_id: _Name = ""
    attempt_id: _Name = ""
    lease_token: _Name = ""
    stream: _StreamName | StreamRef = ""
    message_id: _Name = ""
    error: Error | None = None
    # ours
    kind: _Kind = "fail"
    delay_ms: _DelayMs = 0
    jobs: Annotated[list[FailedJob], Meta(max_length=BATCH_MAX)] | None = None


class SettleResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an attempt. With `ack` its message is done and can be acknowledged.

    `requeued` and `dlq` are for `fail`; `verdict` is the same in one word.
    """

    ok: bool
    ack: bool
    requeued: bool = False
    dlq: bool = False
    # ours
    verdict: str = ""
    due_ms: int = 0
    reason: str = ""


class HeartbeatResults(msgspec.Struct, frozen=True):
    """The answers to a batch of heartbeats, in its order."""

    results: list[HeartbeatResult]


class SettleResults(msgspec.Struct, frozen=True):
    """What became of the attempts of a batch, in its order."""

    results: list[SettleResult]


class ReportResult(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a report was stored; `reason` says why not."""

    ok: bool
    reason: str = ""


class ReportResults(msgspec.Struct, frozen=True):
    """The answers to a batch of reports, in its order."""

    results: list[ReportResult]


class ChildrenResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of the jobs that a running job waited for, by their ids and in their order.

    Without the lease there are none; `reason` says why.
    """

    ok: bool
    results: dict[str, Any] = {}
    reason: str = ""


class SubmitResults(msgspec.Struct, frozen=True):
    """The answers to a batch of new jobs, in its order."""

    results: list[Submitted]


class ReportItem(RequestBody, frozen=True):
    """A report of a running attempt."""

    job_id: _Id
    attempt_id: _Id
    lease_token: _Name
    stream: _StreamName | StreamRef
    type: _Name = "progress"
    step: _Name = ""
    data: msgspec.Raw = msgspec.field(default_factory=partial(msgspec.Raw, b"{}"))
    progress: msgspec.Raw = msgspec.field(default_factory=partial(msgspec.Raw, b""))


class ReportRequest(RequestBody, frozen=True):
    """Stores reports of running attempts."""

    worker_id: _Id
    reports: Annotated[list[ReportItem], Meta(max_length=BATCH_MAX)]


class ChildrenRequest(RequestBody, frozen=True):
    """Asks for the results of the jobs that a running job waited for."""

    worker_id: _Id
    job_id: _Id
    attempt_id: _Id
    lease_token: _Name
    stream: _StreamName | StreamRef


class UpkeepRequest(RequestBody, frozen=True):
    """Asks for a round of upkeep. `slots` is how many jobs the worker runs at once; 0: unknown."""

    worker_id: _Id
    slots: Annotated[int, Meta(ge=0, le=1_000_000)] = 0


class NewPlaneJob(RequestBody, frozen=True):
    """A job of a list. Its numbers are checked when it is stored, and answered per job: one invalid
    job must not refuse the others."""

    payload: msgspec.Raw
    task: _Name = "job"
    stream: _StreamName = ""
    job_id: Annotated[str, Meta(max_length=128, description="Yours; else a UUID is made.")] = ""
    priority: _Integer = 0
    delay_ms: _Integer = 0
    max_attempts: _Integer | None = None
    ttl_ms: _Integer | None = None
    gid: _Name = ""
    trace: _Name = ""
    idempotency_key: Annotated[str, Meta(max_length=255)] = ""
    requester: _Name = ""


class CreatePlaneJobs(RequestBody, frozen=True):
    """Submits one job, or all of `jobs`."""

    payload: msgspec.Raw = msgspec.field(default_factory=partial(msgspec.Raw, b""))
    task: _Name = "job"
    stream: _StreamName = ""
    job_id: Annotated[str, Meta(max_length=128, description="Yours; else a UUID is made.")] = ""
    priority: Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)] = 0
    delay_ms: _DelayMs = 0
    max_attempts: Annotated[int, Meta(ge=1, le=1000)] | None = None
    ttl_ms: Annotated[int, Meta(ge=1, le=_DELAY_MS_MAX)] | None = None
    gid: _Name = ""
    jobs: Annotated[list[NewPlaneJob], Meta(max_length=BATCH_MAX)] | None = None


EventId = Annotated[
    str,
    Meta(
        description="Go on after this event, without gap or repeat.",
        extra_json_schema={"pattern": "^[0-9]{0,18}$"},
    ),
]


class FollowPlaneJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where to begin. The header Last-Event-ID has precedence over `last_event_id`."""

    last_event_id: EventId = ""
    ticket: Annotated[
        str, Meta(description="From POST /v1/tickets; for clients that cannot set headers.")
    ] = ""


class PlaneJobNews(msgspec.Struct, frozen=True, kw_only=True):
    """The `data` of one server-sent event: a state of the job, or a report of its worker."""

    type: str
    ts: int
    step: str
    data: Any


class AttemptView(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt. While it runs `verdict` is `running` and `ended_ms` is 0."""

    attempt_id: str
    attempt: int
    worker_id: str
    claimed_ms: int
    ended_ms: int
    verdict: str
    error: Any = None


class PlaneJobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job with its JSON fields decoded and its newest 100 attempts; times are Unix milliseconds.

    `status` is the contract's word for its state, `state` the one that all contracts share.
    """

    job_id: str
    stream: str
    task: str
    status: str
    state: State
    payload: Any
    result: Any
    error: Any
    attempt: int
    max_attempts: int
    created_ms: int
    updated_ms: int
    due_ms: int = 0
    lease_until_ms: int = 0
    worker_id: str = ""
    progress: Any = None
    priority: int = 0
    gid: str = ""
    cancel_requested: bool = False
    attempts: list[AttemptView] = []


def job_view(record: JobRecord, attempts: list[dict[str, Any]]) -> PlaneJobView:
    """A stored job for an answer."""
    return PlaneJobView(
        job_id=record.job_id,
        stream=record.queue,
        task=record.task,
        status=record.state,
        state=state_of(record),
        payload=_json(record.payload),
        result=_json(record.result),
        error=_json(record.error),
        attempt=record.attempt,
        max_attempts=record.max_attempts,
        created_ms=record.created_ms,
        updated_ms=record.updated_ms,
        due_ms=record.due_ms,
        lease_until_ms=record.lease_until_ms,
        worker_id=record.worker_id,
        progress=_json(record.progress),
        priority=record.priority,
        gid=record.gid,
        cancel_requested=bool(record.extra.get("cancel_requested")),
        attempts=[
            AttemptView(
                attempt_id=each["attempt_id"],
                attempt=each["attempt"],
                worker_id=each["worker_id"],
                claimed_ms=each["claimed_ms"],
                ended_ms=each["ended_ms"],
                verdict=each["verdict"],
                error=_json(each["error"].encode()),
            )
            for each in attempts
        ],
    )


@lru_cache(maxsize=1024)
def _rfc3339(ms: int) -> str:
    """A time of the database's clock as RFC 3339.

    >>> _rfc3339(1_700_000_000_123)
    '2023-11-14T22:13:20.123Z'
    """
    at = datetime.fromtimestamp(min(max(ms, 0), TIME_MS_MAX) / 1000, UTC)
    text = at.isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _json(raw: bytes) -> Any:
    return answer_json(raw) if raw else None


def claimed_job(lease: Lease, ttl_s: float, body: type[ClaimedJob] = ClaimedJob) -> ClaimedJob:
    """A lease for the answer to a claim."""
    return body(
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
        lease_expires_at=_rfc3339(lease.lease_until_ms),
        lease_expires_at_ms=lease.lease_until_ms,
        lease_remaining_ms=lease.lease_ms,
        created_ms=lease.created_ms,
        gid=lease.gid,
        priority=lease.priority,
        trace=lease.trace,
        ttl_ms=lease.ttl_ms,
    )


def heartbeat_result(answer: Lease | LeaseLost) -> HeartbeatResult:
    """An extended lease for the answer to a heartbeat."""
    if isinstance(answer, LeaseLost):
        return HeartbeatResult(ok=False, reason=answer.reason)
    return HeartbeatResult(
        ok=True,
        lease_expires_at=_rfc3339(answer.lease_until_ms),
        lease_expires_at_ms=answer.lease_until_ms,
        lease_remaining_ms=answer.lease_ms,
        cancel_requested=answer.cancel_requested,
    )


def batch_item(body: Any, item: Any) -> Any:
    """A body for one job as an item of a batch."""
    return item(**{name: getattr(body, name) for name in item.__struct_fields__})


def require(body: Any, *names: str) -> None:
    """Refuse a body for one job that lacks one of these fields."""
    for name in names:
        if not getattr(body, name):
            raise Refused("invalid", f"{name} is missing", field=name)


def stream_and_message(given: str | StreamRef) -> tuple[str, str]:
    """The stream and the message id ("" if not given): a body has a name or a reference."""
    return (given, "") if isinstance(given, str) else (given.name, given.message_id)


def completed_outcome(job: CompletedJob) -> Outcome:
    """The outcome of an attempt that succeeded."""
    return Outcome(_lease(job, job.message_id), "complete", _utf8(job.result))


def failed_outcome(job: FailedJob) -> Outcome:
    """The outcome of an attempt that did not succeed."""
    error = job.error
    if error is None and job.kind in ("fail", "retry", "bury"):
        error = Error(code=job.kind)
    failure = None
    if error is not None:
        failure = Failure(
            code=error.code, message=error.message, stack=error.stack, retryable=error.retryable
        )
    lease = _lease(job, job.message_id)
    return Outcome(lease, job.kind, failure=failure, delay_ms=job.delay_ms)


def report_of(item: ReportItem) -> Report:
    """The report of an attempt."""
    return Report(
        lease=_lease(item, ""),
        type=item.type,
        step=item.step,
        data=_utf8(item.data),
        progress=_utf8(item.progress),
    )


def lease_of(item: ChildrenRequest) -> Lease:
    """The lease that a request names."""
    return _lease(item, "")


def _utf8(raw: msgspec.Raw) -> bytes:
    """The bytes of an undecoded part of a body; refused if they are not UTF-8."""
    value = bytes(raw)
    try:
        value.decode()
    except UnicodeDecodeError as error:
        raise Refused("bad_json", f"the body is not UTF-8: {error}") from None
    return value


def _lease(job: Any, message_id: str) -> Lease:
    """The lease that a body names; refused if its fields cannot be a lease."""
    stream, inner_id = stream_and_message(job.stream)
    if not stream:
        raise Refused("invalid", "stream is missing", field="stream")
    try:
        fence = fence_of(job.job_id, job.attempt_id)
    except UsageError as error:
        raise Refused("invalid", str(error), field="attempt_id") from None
    return partial_lease(job.job_id, fence, job.lease_token, stream, message_id or inner_id)


def partial_lease(job_id: str, fence: int, token: str, stream: str, handle: str = "") -> Lease:
    """A lease with only the fields that prove it."""
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
