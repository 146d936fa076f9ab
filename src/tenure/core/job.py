"""Jobs: as submitted (`NewJob`), as stored (`JobRecord`), their events, and checks of new jobs."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from tenure.core.errors import InvalidJob, UsageError

SubmitStatus = Literal["created", "replayed", "conflict", "full", "invalid"]


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job to be stored.

    `job_id` makes a resent submit harmless: the store answers with the job it already has.
    `idempotency_key` does the same for callers that do not choose ids, within one `requester`.
    `max_attempts` counts starts; None leaves it to the contract's own default.
    `options` are the contract's own.
    """

    task: str
    payload: bytes
    job_id: str = ""
    idempotency_key: str = ""
    requester: str = ""
    priority: int = 0
    delay_ms: int = 0
    max_attempts: int | None = None
    ttl_ms: int | None = None
    gid: str = ""
    trace: str = ""
    options: dict[str, Any] = {}


class Submitted(msgspec.Struct, frozen=True):
    """The answer to one `NewJob`. With any `status` but created or replayed nothing was written.

    `job_id` is the stored job, for a replay the earlier one, and "" for a refusal, which `reason`
    explains. `created_ms` is the store's time of a new job, 0 if unknown. `response` is the stored
    answer to the first request with this idempotency key, "" if the contract keeps none.
    """

    job_id: str
    status: SubmitStatus
    reason: str = ""
    retry_after_ms: int = 0
    created_ms: int = 0
    response: str = ""

    @property
    def accepted(self) -> bool:
        """True when the job is in the store, stored now or before."""
        return self.status in ("created", "replayed")


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A stored job as the ledger shows it, in the contract's own state words."""

    job_id: str
    contract: str
    queue: str
    task: str
    state: str
    payload: bytes = b"null"
    result: bytes = b""
    error: bytes = b""
    attempt: int = 0
    max_attempts: int = 0
    fence: int = 0
    created_ms: int = 0
    updated_ms: int = 0
    due_ms: int = 0
    lease_until_ms: int = 0
    ttl_ms: int = 0
    priority: int = 0
    gid: str = ""
    worker_id: str = ""
    requester: str = ""
    progress: bytes = b""
    trace: str = ""
    extra: dict[str, Any] = {}

    @property
    def origin(self) -> tuple[str, int]:
        """Who submitted the job, and when: two jobs that had the same id one after the other
        differ in it."""
        return self.requester, self.created_ms


class JobTemplate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job to be submitted later, as it is stored until then; `payload` is JSON text."""

    task: str
    payload: str = "null"
    priority: int = 0
    max_attempts: int | None = None
    delay_ms: int = 0
    ttl_ms: int | None = None
    gid: str = ""
    trace: str = ""
    options: dict[str, Any] = {}

    def job(self, job_id: str, *, delay_ms: int | None = None) -> NewJob:
        """The job under this id. Its idempotency key is the id: some queues keep keys longer."""
        return NewJob(
            task=self.task,
            payload=self.payload.encode(),
            job_id=job_id,
            idempotency_key=job_id,
            priority=self.priority,
            delay_ms=self.delay_ms if delay_ms is None else delay_ms,
            max_attempts=self.max_attempts,
            ttl_ms=self.ttl_ms,
            gid=self.gid,
            trace=self.trace,
            options=self.options,
        )


def template_of(job: NewJob) -> JobTemplate:
    """The template that makes such jobs."""
    return JobTemplate(
        task=job.task,
        payload=job.payload.decode(),
        priority=job.priority,
        max_attempts=job.max_attempts,
        delay_ms=job.delay_ms,
        ttl_ms=job.ttl_ms,
        gid=job.gid,
        trace=job.trace,
        options=job.options,
    )


Missed = Literal["skip", "one", "all"]
"""What becomes of the times that passed while no worker ran: nothing, one job, a job for each."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Jobs by a cron pattern (`cron`, in the time zone `tz`) or an interval (`every_ms`).

    `declared` says that a task declares it, and not a client. `next_ms` is the next time for which
    no job is stored yet (0: there is none), `last_id` the job of the last one. `error` is why the
    queue refused that job.
    """

    name: str
    template: JobTemplate
    cron: str = ""
    every_ms: int = 0
    tz: str = "UTC"
    missed: Missed = "one"
    declared: bool = False
    next_ms: int = 0
    last_ms: int = 0
    last_id: str = ""
    error: str = ""


class Children(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs that a job waited for, by their ids (in bullmq by keys such as `bull:scenes:17`).

    `results` are of those that completed, in the order of the chain or gather; iterating gives
    them. `failures` are the reasons of those that failed and whose failure is ignored. `fatal` are
    those whose failure fails the parent, `pending` those that have not ended.
    """

    results: dict[str, Any] = {}
    failures: dict[str, str] = {}
    fatal: list[str] = []
    pending: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.results.values())

    def __len__(self) -> int:
        return len(self.results)

    def __bool__(self) -> bool:
        """Whether there are any, in any state."""
        return bool(self.results or self.failures or self.fatal or self.pending)


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a single job's own event stream; `event_id` orders them and resumes a reader."""

    event_id: str
    type: str
    ts_ms: int
    step: str = ""
    data: bytes = b"{}"


def position(event_id: str) -> tuple[int, ...]:
    """An event id as something that can be compared.

    >>> position("1700000000000-10") > position("1700000000000-9") > position("")
    True
    """
    return tuple(int(part) for part in event_id.split("-")) if event_id else ()


KEY_CHARS_MAX = 255


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes.

    >>> canonical({"b": 1, "a": [1.0, None]})
    b'{"a":[1.0,null],"b":1}'
    """
    return msgspec.json.encode(value, order="sorted")


def request_hash(*parts: Any) -> str:
    """A hash that two requests share exactly when all their parts are equal."""
    return hashlib.sha256(canonical(parts)).hexdigest()[:32]


def scoped_key(requester: str, key: str) -> str:
    """The store's key for an idempotency key, different for each requester.

    The anonymous requester's key is kept as it is. Every other key is prefixed with `@requester:`,
    and an anonymous key that begins with @ is prefixed with `@:`. A colon in the requester, which
    a name of single sign-on may have, is escaped.

    >>> scoped_key("", "order-17"), scoped_key("k1", "order-17"), scoped_key("", "@k1:order-17")
    ('order-17', '@k1:order-17', '@:@k1:order-17')
    """
    check_key(key)
    if not requester and not key.startswith("@"):
        return key
    scope = requester.replace("%", "%25").replace(":", "%3A")
    return f"@{scope}:{key}"


def check_key(key: str) -> None:
    """Raise `UsageError` for an idempotency key that is empty, too long or not printable."""
    if not key or len(key) > KEY_CHARS_MAX or not key.isprintable():
        raise UsageError(
            f"an idempotency key has 1 to {KEY_CHARS_MAX} printable characters; "
            f"this one has {len(key)}" + ("" if key.isprintable() else " and control characters")
        )


FULL_RETRY_MS = 1_000
_TASK_CHARS_MAX = 200
_NUMBER_MAX = 2**53
_syntax = msgspec.json.Decoder(msgspec.Raw).decode
_TRACE = re.compile(r"[!-~]{0,512}")


def new_job_id() -> str:
    """A random UUID as text, at a fifth of the cost of the standard library's.

    >>> import uuid
    >>> uuid.UUID(new_job_id()).version
    4
    """
    h = os.urandom(16).hex()
    return f"{h[:8]}-{h[8:12]}-4{h[13:16]}-{'89ab'[int(h[16], 16) & 3]}{h[17:20]}-{h[20:]}"


def derived_id(*parts: Any) -> str:
    """An id that follows from its parts, in the form of a UUID.

    >>> derived_id("job-1", "mail", "{}", 0) == derived_id("job-1", "mail", "{}", 0)
    True
    """
    h = hashlib.sha256(canonical(parts)).hexdigest()
    return f"{h[:8]}-{h[8:12]}-8{h[13:16]}-{'89ab'[int(h[16], 16) & 3]}{h[17:20]}-{h[20:32]}"


def check_job(job: NewJob) -> None:
    """Raise `InvalidJob` for a job that no contract takes. Contracts check ids and options."""
    if not job.task or len(job.task) > _TASK_CHARS_MAX or not job.task.isprintable():
        raise InvalidJob(f"task {job.task[:60]!r}: 1 to {_TASK_CHARS_MAX} printable characters")
    if job.max_attempts is not None and job.max_attempts < 1:
        raise InvalidJob(f"max_attempts counts starts and is at least 1, not {job.max_attempts}")
    if job.delay_ms < 0:
        raise InvalidJob(f"delay_ms cannot be negative, as {job.delay_ms} is")
    numbers = (job.max_attempts or 0, job.delay_ms, job.ttl_ms or 0, abs(job.priority))
    if max(numbers) > _NUMBER_MAX:  # a script would stop in the middle of its writes
        raise InvalidJob(f"a number of a job's options is beyond {_NUMBER_MAX}")
    try:
        _syntax(job.payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidJob(f"the payload is not JSON: {error}") from None


def check_trace(trace: str) -> None:
    """Raise `InvalidJob` for a trace context that would break a line of the journal."""
    if trace and not _TRACE.fullmatch(trace):
        raise InvalidJob("trace is a W3C traceparent: printable ASCII without spaces")


def submitted(status: str, job_id: str, created_ms: int = 0, *, depth_max: int) -> Submitted:
    """The answer of a script as a `Submitted`; any other status means that the queue is full."""
    match status:
        case "created":
            return Submitted(job_id, "created", created_ms=created_ms)
        case "replayed":
            return Submitted(job_id, "replayed")
        case "conflict":
            reason = f"another request was already made under this key or id: job {job_id}"
            return Submitted("", "conflict", reason)
        case _:
            reason = f"the queue holds {depth_max} unfinished jobs, which is its limit"
            return Submitted("", "full", reason, FULL_RETRY_MS)
