"""The HTTP side of the contract: POST /v1/jobs, GET /v1/jobs/{id} and its events, and cancel.

The gateway serves these endpoints: it has authorised the caller and validated the body, and it
renders the errors. A job of another requester is answered like one that does not exist.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tenure.contracts.streams import MACHINE
from tenure.contracts.streams.ledger import StreamsLedger
from tenure.core.encoding import answer_json
from tenure.core.endpoint import (
    STREAM,
    Answer,
    Call,
    Endpoint,
    Follow,
    IdempotencyKey,
    Refused,
    Reply,
    Right,
    Submits,
    TraceParent,
    check_stored,
    idempotency_key,
    trace_context,
)
from tenure.core.errors import Conflict, NotFound, StoreError
from tenure.core.job import JobRecord, NewJob, Submitted, new_job_id
from tenure.core.portable import State, state_of
from tenure.core.redaction import Redaction, without_contents
from tenure.core.seam import Query
from tenure.store.resend import submit_with_retry

Task = Literal["chat", "plan", "code", "tool", "rag", "embed"]
Status = Literal["queued", "running", "done", "error", "canceled"]

_JOB_ID = re.compile(r"[A-Za-z0-9_.:@-]{1,128}")
_EVENT_ID = re.compile(r"[0-9]{1,19}-[0-9]{1,19}")
_EXAMPLE = {"task": "chat", "payload": {"prompt": "Say hello."}, "ttl_s": 3600}
_TTL_S_MAX = 30 * 24 * 3600
_ATTEMPTS_MAX = 100
_DELAY_MS_MAX = 30 * 24 * 3600 * 1000
_PAGE_MAX = 200

Attempts = Annotated[
    int, Meta(ge=1, le=_ATTEMPTS_MAX, description="How often the job may be started.")
]
DelayMs = Annotated[
    int, Meta(ge=0, le=_DELAY_MS_MAX, description="How long to wait before the first start.")
]
TtlS = Annotated[
    int,
    Meta(
        ge=1, le=_TTL_S_MAX, description="Seconds for which the job is kept after its last change."
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

    `status` is the contract's word for its state, `state` the one that all contracts share.
    `payload` is an object, or `{"_raw": text}` where another program stored what is not JSON;
    `result` and `error` are null until there is one.
    """

    job_id: str
    task: str
    status: str
    state: State
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
    state: State
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
    limit: Annotated[int, Meta(ge=1, le=_PAGE_MAX, description="Jobs on a page.")] = 50
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


class StreamsRoutes:
    """The endpoints of one `streams` queue. `ttl_s` is the contract's JOB_TTL_S."""

    def __init__(
        self, queue: Submits, ledger: StreamsLedger, *, ttl_s: int, redaction: Redaction
    ) -> None:
        self._redaction = redaction
        self._queue = queue
        self._ledger = ledger
        self._ttl_s = ttl_s

    async def create(self, call: Call) -> Answer:
        """Store a job. Its id is made here, so that a lost answer can be followed by a resend."""
        job = self._new_job(call)
        (submitted,) = await submit_with_retry(self._queue, [job])
        check_stored(submitted)
        return await self._accepted(call, job, submitted)

    async def read(self, call: Call) -> Answer:
        """The job with its JSON fields decoded."""
        return Answer(200, _view(await self._record(call)))

    async def find(self, call: Call) -> Answer:
        """The caller's jobs, newest first, page by page."""
        params: ListJobs = call.query
        states = (params.status,) if isinstance(params.status, str) else ()
        task = params.task if isinstance(params.task, str) else ""
        query = Query(states=states, task=task, after=params.after, limit=params.limit)
        page = await self._ledger.find(query, requester=call.reach)
        shown = [
            _line(await self._redaction.shown(without_contents(record), call.caller))
            for record in page.jobs
        ]
        return Answer(200, JobPage(shown, page.after))

    async def follow(self, call: Call) -> Answer | Follow:
        """The job's events after an id; 204, which ends an EventSource, if there are no more."""
        after = call.headers.get("last-event-id", "") or call.query.last_event_id
        if after and not _EVENT_ID.fullmatch(after):
            raise Refused(
                "bad_cursor", f"{after[:60]!r} is not an event id such as 1700000000000-0"
            )
        record = await self._record(call)
        if after and record.state in MACHINE.final and not await self._has_more(record, after):
            return Answer(204)
        masked = not call.caller.owns(record.requester)
        return Follow(record.job_id, record.state, after, masked)

    async def cancel(self, call: Call) -> Answer:
        """A queued job ends now (200); a running one through its worker (202)."""
        record = await self._record(call)
        (answer,) = await self._ledger.cancel([record.job_id])
        after = await self._ledger.get(record.job_id)
        if after is None:
            raise _unknown()
        if answer in ("ok", "requested"):
            after = await self._redaction.shown(after, call.caller)
            return Answer(200 if after.state in MACHINE.final else 202, _view(after))
        raise Conflict(f"the job is {after.state} and cannot be canceled any more")

    async def _has_more(self, record: JobRecord, after: str) -> bool:
        return bool(await self._ledger.events(record.job_id, after=after, limit=1))

    async def _accepted(self, call: Call, job: NewJob, submitted: Submitted) -> Answer:
        headers = [("location", f"/v1/jobs/{submitted.job_id}")]
        # Our own repeated submit is not a replay: the id was made for this request.
        if submitted.status == "replayed" and submitted.job_id != job.job_id:
            headers.append(("idempotency-replayed", "true"))
        shown = _as_sent(job, submitted)  # the caller's own, so nothing in it is masked
        if not submitted.created_ms:  # an earlier job, which may be in any state by now
            # The job is stored, and an error now would make the client send it again.
            with suppress(StoreError):
                record = await self._ledger.get(submitted.job_id)
                shown = await self._redaction.shown(record or shown, call.caller)
        return Answer(202, _view(shown), tuple(headers))

    async def _record(self, call: Call) -> JobRecord:
        job_id = call.path["job_id"]
        # `x:events` would be the event stream of job x.
        if not _JOB_ID.fullmatch(job_id) or job_id.endswith(":events"):
            raise _unknown()
        record = await self._ledger.get(job_id)
        if record is None or not call.reaches(record.requester, job_id):
            raise _unknown()
        return await self._redaction.shown(record, call.caller)

    def _new_job(self, call: Call) -> NewJob:
        body: CreateJob = call.body
        ttl_s = self._ttl_s if body.ttl_s is None else body.ttl_s
        return NewJob(
            task=body.task,
            payload=msgspec.json.encode(body.payload),
            job_id=new_job_id(),
            idempotency_key=idempotency_key(call.headers),
            requester=call.caller.requester,
            delay_ms=body.delay_ms,
            max_attempts=body.max_attempts,
            ttl_ms=ttl_s * 1000,
            trace=trace_context(call.headers),
        )

    def endpoints(self) -> list[Endpoint]:
        """The endpoints for the gateway."""
        return [self._create(), self._find(), self._read(), self._follow(), self._cancel()]

    def _create(self) -> Endpoint:
        return Endpoint(
            method="POST",
            path="/v1/jobs",
            operation="createJob",
            summary="Submit a job",
            description="The job is stored and waiting when the answer comes. With an "
            "Idempotency-Key the same request answers with the same job.",
            right=Right("jobs:write", "own", does="submit", audit="others"),
            handle=self.create,
            takes=CreateJob,
            example=_EXAMPLE,
            reads={"Idempotency-Key": IdempotencyKey, "traceparent": TraceParent},
            replies={
                202: Reply(
                    "The job is stored.",
                    JobView,
                    headers={
                        "Location": "Where the job can be read.",
                        "Idempotency-Replayed": "`true` when the job is an earlier one.",
                    },
                )
            },
            problems=(400, 408, 409, 413, 415, 422),
        )

    def _find(self) -> Endpoint:
        return Endpoint(
            method="GET",
            path="/v1/jobs",
            operation="listJobs",
            summary="List jobs, newest first",
            right=Right("jobs:read", "own"),
            handle=self.find,
            asks=ListJobs,
            is_search=True,
            replies={200: Reply("A page of jobs.", JobPage)},
            problems=(422,),
        )

    def _read(self) -> Endpoint:
        return Endpoint(
            method="GET",
            path="/v1/jobs/{job_id}",
            operation="readJob",
            summary="Read a job",
            right=Right("jobs:read", "own"),
            handle=self.read,
            replies={200: Reply("The job.", JobView)},
            problems=(404,),
        )

    def _follow(self) -> Endpoint:
        return Endpoint(
            method="GET",
            path="/v1/jobs/{job_id}/events",
            operation="followJob",
            summary="Follow a job by server-sent events",
            description="Begins with `event: hello`, replays what has happened, goes on as it "
            "happens and ends after `done`, `error` or `canceled`. `id:` is the position for "
            "Last-Event-ID; comments keep the connection alive.",
            right=Right("jobs:read", "own"),
            handle=self.follow,
            asks=FollowJob,
            reads={"Last-Event-ID": EventId},
            replies={
                200: Reply("A stream of events.", JobNews, media=STREAM),
                204: Reply("The job has ended and there is nothing after that position."),
            },
            problems=(400, 404, 422),
        )

    def _cancel(self) -> Endpoint:
        return Endpoint(
            method="POST",
            path="/v1/jobs/{job_id}/cancel",
            operation="cancelJob",
            summary="Cancel a job",
            right=Right("jobs:cancel", "own", does="cancel", audit="others"),
            handle=self.cancel,
            replies={
                200: Reply("The job was waiting and has ended.", JobView),
                202: Reply("The job is running; its worker is asked to stop it.", JobView),
            },
            problems=(404, 409),
        )


def _view(record: JobRecord) -> JobView:
    """A stored job for a response."""
    return JobView(
        job_id=record.job_id,
        task=record.task,
        status=record.state,
        state=state_of(record),
        payload=_json_value(record.payload),
        result=_json_value(record.result),
        error=_json_value(record.error),
        created_ts=record.created_ms,
        updated_ts=record.updated_ms,
        ttl_s=record.ttl_ms // 1000,
        attempt=record.attempt,
        max_attempts=record.max_attempts,
        progress=_json_value(record.progress),
        due_ts=record.due_ms,
        cancel_requested=bool(record.extra.get("cancel_requested")),
    )


def _line(record: JobRecord) -> JobLine:
    """A stored job for a list."""
    return JobLine(
        job_id=record.job_id,
        task=record.task,
        status=record.state,
        state=state_of(record),
        created_ts=record.created_ms,
        updated_ts=record.updated_ms,
        ttl_s=record.ttl_ms // 1000,
        attempt=record.attempt,
        error=_json_value(record.error),
    )


def _json_value(raw: bytes) -> Any:
    """The value of a JSON field of the hash; None if it is empty."""
    return answer_json(raw) if raw else None


def _unknown() -> NotFound:
    return NotFound("there is no such job, or it has expired, or it is not yours")


def _as_sent(job: NewJob, submitted: Submitted) -> JobRecord:
    """The job that was just stored, without reading it back."""
    return JobRecord(
        job_id=submitted.job_id,
        contract="streams",
        queue="",
        task=job.task,
        state="queued",
        payload=job.payload,
        max_attempts=job.max_attempts or 0,
        ttl_ms=job.ttl_ms or 0,
        created_ms=submitted.created_ms,
        updated_ms=submitted.created_ms,
        due_ms=submitted.created_ms + job.delay_ms if job.delay_ms else 0,
        requester=job.requester,
        trace=job.trace,
    )


def open_routes(
    queue: Submits, ledger: StreamsLedger, *, ttl_s: int, redaction: Redaction, **_unused: object
) -> list[Endpoint]:
    """The endpoints of a queue of this contract."""
    return StreamsRoutes(queue, ledger, ttl_s=ttl_s, redaction=redaction).endpoints()
