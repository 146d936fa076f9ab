"""The producers' side over HTTP: POST /v1/plane/jobs, and reading a job with its attempts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tenure.contracts.plane.ledger import PlaneLedger
from tenure.contracts.plane.scoping import check_allowed
from tenure.contracts.plane.shapes import (
    BODY_BYTES_MAX,
    CreatePlaneJobs,
    EventId,
    FollowPlaneJob,
    NewPlaneJob,
    PlaneJobNews,
    PlaneJobView,
    Results,
    StoredResults,
    view,
)
from tenure.core.endpoint import (
    Answer,
    Call,
    Endpoint,
    Follow,
    Refused,
    Reply,
    Right,
    Submits,
    check_stored,
    idempotency_key,
    trace_context,
)
from tenure.core.errors import Conflict, NotFound
from tenure.core.job import JobRecord, NewJob, Submitted
from tenure.core.redaction import Redaction
from tenure.core.state import PLANE as MACHINE
from tenure.ledger.ids import uuid7
from tenure.store.resending import submit_surely

_EVENT_ID = re.compile(r"[0-9]{1,18}")
_JOB_ID = re.compile(r"[A-Za-z0-9_.@:-]{1,128}")
_EXAMPLE = {"stream": "jobs", "task": "greet", "payload": {"name": "Ada"}, "max_attempts": 3}


class Jobs:
    """The endpoints of the producers."""

    def __init__(self, queue: Submits, ledger: PlaneLedger, redaction: Redaction) -> None:
        self._redaction = redaction
        self._queue = queue
        self._ledger = ledger

    async def create(self, call: Call) -> Answer:
        """Store a job, or those of a list; ids are chosen here where the caller chose none."""
        asked: CreatePlaneJobs = call.body
        if asked.jobs is not None:
            return await self._create_all(asked.jobs, call)
        if not bytes(asked.payload):
            raise Refused("invalid", "payload is missing", field="payload")
        key, trace = idempotency_key(call.headers), trace_context(call.headers)
        job = self._new_job(asked, call, key, trace)
        (submitted,) = await submit_surely(self._queue, [job])
        check_stored(submitted)
        return await self._accepted(call, job, submitted)

    async def _create_all(self, asked: Sequence[NewPlaneJob], call: Call) -> Answer:
        """Answers are per job: one that is refused harms no other."""
        jobs = [self._new_job(each, call, each.idempotency_key, each.trace) for each in asked]
        return Answer(200, Results(await submit_surely(self._queue, jobs) if jobs else []))

    async def read(self, call: Call) -> Answer:
        """The job with its JSON fields decoded, and its attempts."""
        return Answer(200, await self._view(call))

    async def follow(self, call: Call) -> Answer | Follow:
        """The job's events from a position on; nothing more to come is 204, which ends a client."""
        after = call.headers.get("last-event-id", "") or call.query.last_event_id
        if after and not _EVENT_ID.fullmatch(after):
            raise Refused("bad_cursor", f"{after[:60]!r} is not an event id such as 3")
        record = await self._record(call)
        ended = after and record.state in MACHINE.final
        if ended and not await self._ledger.events(record.job_id, after=after, limit=1):
            return Answer(204)
        masked = not call.caller.owns(record.requester)
        return Follow(record.job_id, record.state, after, masked)

    async def cancel(self, call: Call) -> Answer:
        """A waiting job ends now (200); a running one through its worker (202)."""
        record = await self._record(call)
        (said,) = await self._ledger.cancel([record.job_id])
        if said not in ("ok", "requested"):
            raise Conflict(f"the job is {said} and cannot be cancelled any more")
        return Answer(200 if said == "ok" else 202, await self._view(call))

    async def _view(self, call: Call) -> PlaneJobView:
        record = await self._record(call)
        attempts = await self._ledger.attempts(record.job_id)
        if not call.caller.owns(record.requester):
            errors = [each["error"].encode() for each in attempts]
            masked = await self._redaction.apart(
                sum(map(len, errors)), lambda: [self._redaction.error(each) for each in errors]
            )
            attempts = [
                {**each, "error": error.decode()}
                for each, error in zip(attempts, masked, strict=True)
            ]
        return view(record, attempts)

    async def _accepted(self, call: Call, job: NewJob, submitted: Submitted) -> Answer:
        headers = [("location", f"/v1/plane/jobs/{submitted.job_id}")]
        if submitted.status == "replayed" and submitted.job_id != job.job_id:
            headers.append(("idempotency-replayed", "true"))
        record = await self._ledger.get(submitted.job_id)
        if record is None:  # it has ended and was removed meanwhile
            raise _unknown()
        shown = await self._redaction.shown(record, call.caller)
        return Answer(202, view(shown, []), tuple(headers))

    async def _record(self, call: Call) -> JobRecord:
        job_id = call.path["job_id"]
        record = await self._ledger.get(job_id) if _JOB_ID.fullmatch(job_id) else None
        if record is None or not call.reaches(record.requester, job_id):
            raise _unknown()
        streams = call.caller.streams
        if streams and record.queue not in streams:
            raise _unknown()
        return await self._redaction.shown(record, call.caller)

    def _new_job(self, asked: Any, call: Call, key: str, trace: str) -> NewJob:
        check_allowed(call.caller, [asked.stream or self._ledger.default_stream])
        job_id = asked.job_id or uuid7()
        requester = getattr(asked, "requester", "")
        if requester and not call.reaches(requester, job_id):
            raise Refused("scope", "only an admin may submit in another requester's name")
        try:
            payload = bytes(asked.payload)
            payload.decode()
        except UnicodeDecodeError as error:
            raise Refused("bad_json", f"the body is not UTF-8: {error}") from None
        return NewJob(
            task=asked.task,
            payload=payload,
            job_id=job_id,
            idempotency_key=key,
            requester=requester or call.caller.requester,
            priority=asked.priority,
            delay_ms=asked.delay_ms,
            max_attempts=asked.max_attempts,
            ttl_ms=asked.ttl_ms,
            gid=asked.gid,
            trace=trace,
            options={"stream": asked.stream} if asked.stream else {},
        )

    def endpoints(self) -> list[Endpoint]:
        """What the gateway shall serve."""
        path = "/v1/plane/jobs/{job_id}"
        return [
            Endpoint(
                method="POST",
                path="/v1/plane/jobs",
                operation="createPlaneJob",
                summary="Submit a job to the plane, or several",
                description="The job is stored and waiting when the answer comes. With an "
                "Idempotency-Key the same request answers with the same job. `jobs` is a list, "
                "answered per job.",
                right=Right("jobs:write", "own", does="submit", audit="others", streams=True),
                handle=self.create,
                takes=CreatePlaneJobs,
                example=_EXAMPLE,
                replies={
                    202: Reply("The job is stored.", PlaneJobView),
                    200: Reply("What became of each job of the list.", StoredResults),
                },
                problems=(400, 408, 409, 413, 415, 422),
                tag="plane",
                bytes_max=BODY_BYTES_MAX,
            ),
            Endpoint(
                method="GET",
                path=path,
                operation="readPlaneJob",
                summary="Read a job of the plane",
                right=Right("jobs:read", "own", streams=True),
                handle=self.read,
                replies={200: Reply("The job, with its attempts.", PlaneJobView)},
                problems=(404,),
                tag="plane",
            ),
            Endpoint(
                method="GET",
                path=f"{path}/events",
                operation="followPlaneJob",
                summary="Follow a job of the plane by server-sent events",
                description="Begins with `event: hello`, replays what has happened, goes on as it "
                "happens and ends after `SUCCEEDED` or `DLQ`. `id:` is the position for "
                "Last-Event-ID; comments keep the connection alive.",
                right=Right("jobs:read", "own", streams=True),
                handle=self.follow,
                asks=FollowPlaneJob,
                reads={"Last-Event-ID": EventId},
                replies={
                    200: Reply("A stream of events.", PlaneJobNews, media="text/event-stream"),
                    204: Reply("The job has ended and there is nothing after that position."),
                },
                problems=(400, 404, 422),
                tag="plane",
            ),
            Endpoint(
                method="POST",
                path=f"{path}/cancel",
                operation="cancelPlaneJob",
                summary="Cancel a job of the plane",
                right=Right("jobs:cancel", "own", does="cancel", audit="others", streams=True),
                handle=self.cancel,
                replies={
                    200: Reply("The job was waiting and has ended.", PlaneJobView),
                    202: Reply("The job is running; its worker is told.", PlaneJobView),
                },
                problems=(404, 409),
                tag="plane",
            ),
        ]


def _unknown() -> NotFound:
    return NotFound("there is no such job, or it was removed, or it is not yours")
