"""The JSON of the contract's HTTP side, and its conversion."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tenure.contracts.plane.model import attempt_id_of, fence_of
from tenure.core.encoding import answer_json
from tenure.core.endpoint import Refused
from tenure.core.errors import LeaseLost, UsageError
from tenure.core.job import JobRecord, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Failure, Outcome

BATCH_MAX = 500
BODY_BYTES_MAX = 1 << 20
TEXT_MAX = 512
DELAY_MS_MAX = 30 * 24 * 3600 * 1000
_MOMENT_MAX = 253_402_300_799_999

Id = Annotated[str, Meta(min_length=1, max_length=TEXT_MAX)]
Name = Annotated[str, Meta(max_length=TEXT_MAX)]
StreamName = Annotated[str, Meta(max_length=100, description="A stream of this plane.")]
WaitMs = Annotated[int, Meta(ge=0, le=3_600_000, description="How long to wait for a job.")]
DelayMs = Annotated[int, Meta(ge=0, le=DELAY_MS_MAX)]
Whole = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Kind = Literal["fail", "retry", "bury", "snooze", "release", "cancel"]


class Sends(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client sends: a misspelt field is refused, not ignored."""


class StreamRef(Sends, frozen=True):
    """Where a job's message is."""

    name: StreamName
    message_id: Name = ""


class ClaimRequest(Sends, frozen=True):
    """Asks for work. `streams` are tried in this order; none means all of the plane."""

    worker_id: Id
    streams: Annotated[list[StreamName], Meta(max_length=100)] = []
    max_wait_ms: WaitMs = 0
    # ours
    claim_id: Name = ""
    max_jobs: Annotated[int, Meta(ge=0, le=BATCH_MAX)] = 0
    fresh: bool = False
    lost: Annotated[list[Name], Meta(max_length=20)] = []


class ClaimedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One lease. The times after `# ours` are milliseconds on the database's clock."""

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


class Claimed(ClaimedJob, frozen=True, kw_only=True):
    """The contract's answer to a claim that found a job."""

    claimed: bool = True


class Unclaimed(msgspec.Struct, frozen=True):
    """The contract's answer to a claim that found none."""

    claimed: bool = False


class ClaimedJobs(msgspec.Struct, frozen=True):
    """The answer to a claim with `max_jobs`."""

    claimed: bool
    jobs: list[ClaimedJob]


class HeldLease(Sends, frozen=True):
    """A lease, named by its holder."""

    job_id: Id
    lease_token: Name
    # ours: with both, the plane need not look them up
    attempt_id: Name = ""
    stream: StreamName | StreamRef = ""


class HeartbeatRequest(Sends, frozen=True):
    """Keeps a lease, or all of `leases`."""

    worker_id: Id
    job_id: Name = ""
    lease_token: Name = ""
    # ours
    attempt_id: Name = ""
    stream: StreamName | StreamRef = ""
    leases: Annotated[list[HeldLease], Meta(max_length=BATCH_MAX)] | None = None
    if_short: Annotated[
        bool, Meta(description="Extend only leases of which less than two thirds are left.")
    ] = False


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the lease is still held, and until when; `lease_remaining_ms` needs no clock."""

    ok: bool
    lease_expires_at: str | None = None
    # ours
    lease_expires_at_ms: int = 0
    lease_remaining_ms: int = 0
    cancel_requested: bool = False
    reason: str = ""


class CompletedJob(Sends, frozen=True):
    """An attempt that succeeded."""

    job_id: Id
    attempt_id: Id
    lease_token: Name
    stream: StreamName | StreamRef
    message_id: Name = ""
    result: msgspec.Raw = msgspec.field(default_factory=partial(msgspec.Raw, b"null"))


class CompleteRequest(Sends, frozen=True):
    """Ends an attempt with its result, or all of `jobs`."""

    worker_id: Id
    job_id: Name = ""
    attempt_id: Name = ""
    lease_token: Name = ""
    stream: StreamName | StreamRef = ""
    message_id: Name = ""
    result: msgspec.Raw = msgspec.field(default_factory=partial(msgspec.Raw, b"null"))
    # ours
    jobs: Annotated[list[CompletedJob], Meta(max_length=BATCH_MAX)] | None = None


class Error(Sends, frozen=True):
    """Why an attempt failed."""

    code: str = "error"
    message: str = ""
    stack: str = ""
    retryable: bool = True


class FailedJob(Sends, frozen=True):
    """An attempt that did not succeed. `kind` other than `fail` says what shall become of it."""

    job_id: Id
    attempt_id: Id
    lease_token: Name
    stream: StreamName | StreamRef
    message_id: Name = ""
    error: Error | None = None
    # ours
    kind: Kind = "fail"
    delay_ms: DelayMs = 0


class FailRequest(Sends, frozen=True):
    """Ends an attempt that did not succeed, or all of `jobs`."""

    worker_id: Id
    job_id: Name = ""
    attempt_id: Name = ""
    lease_token: Name = ""
    stream: StreamName | StreamRef = ""
    message_id: Name = ""
    error: Error | None = None
    # ours
    kind: Kind = "fail"
    delay_ms: DelayMs = 0
    jobs: Annotated[list[FailedJob], Meta(max_length=BATCH_MAX)] | None = None


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an attempt. `ack` says that its message has had its effect.

    `requeued` and `dlq` are of `fail`; `verdict` is the same in one word.
    """

    ok: bool
    ack: bool
    requeued: bool = False
    dlq: bool = False
    # ours
    verdict: str = ""
    due_ms: int = 0
    reason: str = ""


class Results(msgspec.Struct, frozen=True):
    """The answers to a batch, in its order; the shapes below say which for the API document."""

    results: list[Any]


class KeptResults(msgspec.Struct, frozen=True):
    """The answers to the heartbeats of a batch, in its order."""

    results: list[Kept]


class EndedResults(msgspec.Struct, frozen=True):
    """What became of the attempts of a batch, in its order."""

    results: list[Ended]


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """Whether news was stored; `reason` says why not."""

    ok: bool
    reason: str = ""


class ToldResults(msgspec.Struct, frozen=True):
    """Whether each of the news was stored, in their order."""

    results: list[Told]


class StoredResults(msgspec.Struct, frozen=True):
    """What became of each job of a list, in its order."""

    results: list[Submitted]


class ReportedNews(Sends, frozen=True):
    """News from a running attempt."""

    job_id: Id
    attempt_id: Id
    lease_token: Name
    stream: StreamName | StreamRef
    type: Name = "progress"
    step: Name = ""
    data: msgspec.Raw = msgspec.field(default_factory=partial(msgspec.Raw, b"{}"))
    progress: msgspec.Raw = msgspec.field(default_factory=partial(msgspec.Raw, b""))


class ReportRequest(Sends, frozen=True):
    """Publishes news."""

    worker_id: Id
    reports: Annotated[list[ReportedNews], Meta(max_length=BATCH_MAX)]


class UpkeepRequest(Sends, frozen=True):
    """Asks for a round of upkeep. `slots` says how many jobs the worker runs at once, if told."""

    worker_id: Id
    slots: Annotated[int, Meta(ge=0, le=1_000_000)] = 0


class NewPlaneJob(Sends, frozen=True):
    """A job of a list. What cannot be stored is answered per job, so its numbers are not bounded
    here: one wrong job must not refuse the others."""

    payload: msgspec.Raw
    task: Name = "job"
    stream: StreamName = ""
    job_id: Annotated[str, Meta(max_length=128, description="Yours; else a UUID is made.")] = ""
    priority: Whole = 0
    delay_ms: Whole = 0
    max_attempts: Whole | None = None
    ttl_ms: Whole | None = None
    gid: Name = ""
    trace: Name = ""
    idempotency_key: Annotated[str, Meta(max_length=255)] = ""
    requester: Name = ""


class CreatePlaneJobs(Sends, frozen=True):
    """One job, or all of `jobs`."""

    payload: msgspec.Raw = msgspec.field(default_factory=partial(msgspec.Raw, b""))
    task: Name = "job"
    stream: StreamName = ""
    job_id: Annotated[str, Meta(max_length=128, description="Yours; else a UUID is made.")] = ""
    priority: Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)] = 0
    delay_ms: DelayMs = 0
    max_attempts: Annotated[int, Meta(ge=1, le=1000)] | None = None
    ttl_ms: Annotated[int, Meta(ge=1, le=DELAY_MS_MAX)] | None = None
    gid: Name = ""
    jobs: Annotated[list[NewPlaneJob], Meta(max_length=BATCH_MAX)] | None = None


EventId = Annotated[
    str,
    Meta(
        description="Go on after this event, without gap or repeat.",
        extra_json_schema={"pattern": "^[0-9]{0,18}$"},
    ),
]


class FollowPlaneJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where to begin; the header Last-Event-ID wins over `last_event_id`."""

    last_event_id: EventId = ""
    ticket: Annotated[
        str, Meta(description="From POST /v1/tickets; for clients that cannot set headers.")
    ] = ""


class PlaneJobNews(msgspec.Struct, frozen=True, kw_only=True):
    """The `data` of one server-sent event: a state of the job, or news of its worker."""

    type: str
    ts: int
    step: str
    data: Any


class AttemptView(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt, from its claim on: while it runs `verdict` is `running` and `ended_ms` 0."""

    attempt_id: str
    attempt: int
    worker_id: str
    claimed_ms: int
    ended_ms: int
    verdict: str
    error: Any = None


class PlaneJobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job with its JSON fields decoded and its attempts; times are Unix milliseconds."""

    job_id: str
    stream: str
    task: str
    status: str
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


def view(record: JobRecord, attempts: list[dict[str, Any]]) -> PlaneJobView:
    """A stored job as it is shown."""
    return PlaneJobView(
        job_id=record.job_id,
        stream=record.queue,
        task=record.task,
        status=record.state,
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
def moment(ms: int) -> str:
    """A time of the database's clock as RFC 3339.

    >>> moment(1_700_000_000_123)
    '2023-11-14T22:13:20.123Z'
    """
    at = datetime.fromtimestamp(min(max(ms, 0), _MOMENT_MAX) / 1000, UTC)
    text = at.isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _json(raw: bytes) -> Any:
    return answer_json(raw) if raw else None


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
