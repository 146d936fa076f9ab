"""What /api answers, in one shape for every contract."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tenure.core.job import JobEvent, JobRecord
from tenure.dashboard.kinds import kind_of
from tenure.dashboard.reading import decoded, fault_of

_NO_NUL = r"^[^\x00]*$"


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job in a list. `kind` is its state in words that hold for every contract."""

    queue: str
    job_id: str
    contract: str
    task: str
    state: str
    kind: str
    attempt: int
    max_attempts: int
    created_ms: int
    updated_ms: int
    due_ms: int
    worker_id: str
    error_class: str
    error_message: str


class JobFull(msgspec.Struct, frozen=True, kw_only=True):
    """A job with everything. Its secrets are masked for all but its requester."""

    queue: str
    job_id: str
    contract: str
    task: str
    state: str
    kind: str
    payload: Any
    result: Any
    error: Any
    progress: Any
    attempt: int
    max_attempts: int
    fence: int
    created_ms: int
    updated_ms: int
    due_ms: int
    lease_until_ms: int
    ttl_ms: int
    priority: int
    gid: str
    worker_id: str
    requester: str
    trace: str
    extra: dict[str, Any]


class JobList(msgspec.Struct, frozen=True):
    """Jobs, newest first. Pass `after` on for more; with `complete` false the search goes on."""

    jobs: list[JobRow]
    after: str
    complete: bool


class EventLine(msgspec.Struct, frozen=True):
    """One event of a job."""

    id: str
    type: str
    ts_ms: int
    step: str
    data: Any


class EventList(msgspec.Struct, frozen=True):
    """Events of one job, oldest first."""

    events: list[EventLine]


class NewJobBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job to submit to any queue."""

    task: Annotated[str, Meta(min_length=1, max_length=200, pattern=_NO_NUL)]
    payload: Any = msgspec.UNSET
    job_id: Annotated[str, Meta(max_length=128, pattern=_NO_NUL)] = ""
    priority: Annotated[int, Meta(ge=0, le=2_097_151)] = 0
    delay_ms: Annotated[int, Meta(ge=0, le=31_536_000_000)] = 0
    max_attempts: Annotated[int, Meta(ge=1, le=1000)] | None = None
    gid: Annotated[str, Meta(max_length=128, pattern=_NO_NUL)] = ""


class SubmittedJob(msgspec.Struct, frozen=True):
    """Where the job is."""

    queue: str
    job_id: str
    status: str


class Ids(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Jobs by id."""

    job_ids: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=128, pattern=_NO_NUL)]],
        Meta(min_length=1, max_length=500),
    ]


class ActionAnswers(msgspec.Struct, frozen=True):
    """Per job "ok", "requested", or what forbids it."""

    answers: dict[str, str]


class BulkBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An action on all jobs of a search. With `expect`, refused when that many are exceeded."""

    action: Literal["retry", "cancel", "remove"]
    q: Annotated[str, Meta(min_length=1, max_length=1000, pattern=_NO_NUL)]
    expect: Annotated[int, Meta(ge=0, le=2**53)] | None = None


class CountView(msgspec.Struct, frozen=True):
    """How many jobs match; `exact` false means at least so many."""

    jobs: int
    exact: bool


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker: when it was last heard of, and what it holds now. `slots` 0 means not told."""

    queue: str
    worker_id: str
    last_ms: int
    slots: int
    started: int
    finished: int
    failed: int
    jobs: list[JobRow]


class WorkerList(msgspec.Struct, frozen=True):
    """The workers of all queues."""

    workers: list[WorkerView]


class DeadGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Failed jobs with the same error class."""

    queue: str
    error_class: str
    jobs: int
    tasks: list[str]
    last_ms: int
    message: str


class DeadList(msgspec.Struct, frozen=True):
    """Dead letters by error class; `complete` false when only the newest were looked at."""

    groups: list[DeadGroup]
    complete: bool


class Backlog(msgspec.Struct, frozen=True):
    """For scalers such as KEDA's metrics-api: read `backlog` or `desired`."""

    queue: str
    backlog: int
    running: int
    workers: int
    desired: int
    oldest_waiting_ms: int


def job_line(queue: str, job: JobRecord) -> JobRow:
    """The line of a job."""
    fault = fault_of(job.error)
    return JobRow(
        queue=queue,
        job_id=job.job_id,
        contract=job.contract,
        task=job.task,
        state=job.state,
        kind=kind_of(job.state),
        attempt=job.attempt,
        max_attempts=job.max_attempts,
        created_ms=job.created_ms,
        updated_ms=job.updated_ms,
        due_ms=job.due_ms,
        worker_id=job.worker_id,
        error_class=fault.name,
        error_message=fault.message[:300],
    )


def job_full(queue: str, job: JobRecord) -> JobFull:
    """All of a job."""
    return JobFull(
        queue=queue,
        job_id=job.job_id,
        contract=job.contract,
        task=job.task,
        state=job.state,
        kind=kind_of(job.state),
        payload=decoded(job.payload),
        result=decoded(job.result),
        error=decoded(job.error),
        progress=decoded(job.progress),
        attempt=job.attempt,
        max_attempts=job.max_attempts,
        fence=job.fence,
        created_ms=job.created_ms,
        updated_ms=job.updated_ms,
        due_ms=job.due_ms,
        lease_until_ms=job.lease_until_ms,
        ttl_ms=job.ttl_ms,
        priority=job.priority,
        gid=job.gid,
        worker_id=job.worker_id,
        requester=job.requester,
        trace=job.trace,
        extra=dict(job.extra),
    )


def event_line(event: JobEvent) -> EventLine:
    """The line of an event."""
    return EventLine(event.event_id, event.type, event.ts_ms, event.step, decoded(event.data))
