"""The JSON shapes of the contract's HTTP side: what a client sends, and how a job is shown."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tenure.core.encoding import answer_json
from tenure.core.job import JobRecord

Task = Literal["chat", "plan", "code", "tool", "rag", "embed"]
Status = Literal["queued", "running", "done", "error", "canceled"]

TTL_S_MAX = 30 * 24 * 3600
ATTEMPTS_MAX = 100
DELAY_MS_MAX = 30 * 24 * 3600 * 1000
PAGE_MAX = 200

Attempts = Annotated[
    int, Meta(ge=1, le=ATTEMPTS_MAX, description="How often the job may be started.")
]
DelayMs = Annotated[
    int, Meta(ge=0, le=DELAY_MS_MAX, description="How long to wait before the first start.")
]
TtlS = Annotated[
    int,
    Meta(
        ge=1, le=TTL_S_MAX, description="Seconds for which the job is kept after its last change."
    ),
]

EventId = Annotated[
    str,
    Meta(
        description="Go on after this event, without gap or repeat.",
        extra_json_schema={"pattern": r"^([0-9]{1,19}-[0-9]{1,19})?$"},
    ),
]


class CreateJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job to be done. `max_attempts` and `delay_ms` are additions to the contract."""

    task: Task
    payload: dict[str, Any]
    ttl_s: TtlS | None = None
    max_attempts: Attempts | None = None
    delay_ms: DelayMs = 0


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job with its JSON fields decoded; times are Unix milliseconds.

    `payload` is an object, or `{"_raw": text}` where another program stored what is not JSON;
    `result` and `error` are null until there is one.
    """

    job_id: str
    task: str
    status: str
    payload: Any
    result: Any
    error: Any
    created_ts: int
    updated_ts: int
    ttl_s: int
    attempt: int = 0
    max_attempts: int = 0
    progress: Any = None
    due_ts: int = 0
    cancel_requested: bool = False


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    """A job in a list, without payload and result."""

    job_id: str
    task: str
    status: str
    created_ts: int
    updated_ts: int
    ttl_s: int
    attempt: int = 0
    error: Any = None


class JobPage(msgspec.Struct, frozen=True):
    """Some jobs, newest first; `after` is the parameter for the next page, "" at the end."""

    jobs: list[JobLine]
    after: str = ""


class ListJobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which jobs to list."""

    status: Annotated[Status | UnsetType, Meta(description="Only jobs in this state.")] = UNSET
    task: Annotated[Task | UnsetType, Meta(description="Only jobs of this task.")] = UNSET
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX, description="Jobs on a page.")] = 50
    after: Annotated[
        str,
        Meta(
            pattern=r"^([0-9]{1,16}:[A-Za-z0-9_.:@-]{0,128})?$",
            description="`after` of the page before; empty for the first.",
        ),
    ] = ""


class FollowJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where to begin; the header Last-Event-ID wins over `last_event_id`."""

    last_event_id: EventId = ""
    ticket: Annotated[
        str, Meta(description="From POST /v1/tickets; for clients that cannot set headers.")
    ] = ""


class JobNews(msgspec.Struct, frozen=True, kw_only=True):
    """The `data` of one server-sent event."""

    type: str
    ts: int
    step: str
    data: Any


def view(record: JobRecord) -> JobView:
    """A stored job as the API shows it."""
    return JobView(
        job_id=record.job_id,
        task=record.task,
        status=record.state,
        payload=value_of(record.payload),
        result=value_of(record.result),
        error=value_of(record.error),
        created_ts=record.created_ms,
        updated_ts=record.updated_ms,
        ttl_s=record.ttl_ms // 1000,
        attempt=record.attempt,
        max_attempts=record.max_attempts,
        progress=value_of(record.progress),
        due_ts=record.due_ms,
        cancel_requested=bool(record.extra.get("cancel_requested")),
    )


def line(record: JobRecord) -> JobLine:
    """A stored job as a list shows it."""
    return JobLine(
        job_id=record.job_id,
        task=record.task,
        status=record.state,
        created_ts=record.created_ms,
        updated_ts=record.updated_ms,
        ttl_s=record.ttl_ms // 1000,
        attempt=record.attempt,
        error=value_of(record.error),
    )


def value_of(raw: bytes) -> Any:
    """A JSON field of the hash as a value: None for empty, `_raw` for what does not parse."""
    return answer_json(raw) if raw else None
