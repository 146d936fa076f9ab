"""The HTTP API of a plane: the endpoints of producers and of workers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from tenure.contracts.plane import MACHINE
from tenure.contracts.plane.ledger import PlaneLedger
from tenure.contracts.plane.model import Claim, fence_of
from tenure.contracts.plane.news import NewsRoutes, check_position
from tenure.contracts.plane.plane import Plane
from tenure.contracts.plane.schedules import WAITING_MAX, ScheduleRoutes, in_turn
from tenure.contracts.plane.schemas import (
    BODY_BYTES_MAX,
    ChildrenRequest,
    ChildrenResult,
    ClaimRequest,
    ClaimResult,
    ClaimResults,
    CompletedJob,
    CompleteRequest,
    CreatePlaneJobs,
    EmptyClaimResult,
    EventId,
    FailedJob,
    FailRequest,
    FollowPlaneJob,
    HeartbeatRequest,
    HeartbeatResult,
    HeartbeatResults,
    LeaseRef,
    NewPlaneJob,
    PlaneJobNews,
    PlaneJobView,
    ReportRequest,
    ReportResult,
    ReportResults,
    SettleResult,
    SettleResults,
    SubmitResults,
    UpkeepRequest,
    batch_item,
    claimed_job,
    completed_outcome,
    failed_outcome,
    heartbeat_result,
    job_view,
    lease_of,
    partial_lease,
    report_of,
    require,
    stream_and_message,
)
from tenure.core.encoding import answer_json
from tenure.core.endpoint import (
    STREAM,
    Answer,
    Call,
    Caller,
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
from tenure.core.errors import Conflict, LeaseLost, NotFound
from tenure.core.job import JobRecord, NewJob, Submitted
from tenure.core.lease import Lease
from tenure.core.outcome import (
    VERDICT_NAMES,
    Buried,
    Cancelled,
    Outcome,
    Released,
    Retried,
    Verdict,
)
from tenure.core.redaction import Redaction
from tenure.core.seam import Upkeep
from tenure.sql.submit import uuid7
from tenure.store.batcher import Turns
from tenure.store.resend import submit_with_retry

_PROBLEMS = (400, 403, 408, 413, 415, 422)
_READING_MAX = 2
_JOB_ID = re.compile(r"[A-Za-z0-9_.@:-]{1,128}")
_EXAMPLE = {"stream": "jobs", "task": "greet", "payload": {"name": "Ada"}, "max_attempts": 3}


class _JobRoutes:
    """The endpoints of producers."""

    def __init__(self, queue: Submits, ledger: PlaneLedger, redaction: Redaction) -> None:
        self._redaction = redaction
        self._queue = queue
        self._ledger = ledger

    async def create(self, call: Call) -> Answer:
        """Store a job, or those of a list. A job without an id gets one."""
        body: CreatePlaneJobs = call.body
        if body.jobs is not None:
            return await self._create_all(body.jobs, call)
        if not bytes(body.payload):
            raise Refused("invalid", "payload is missing", field="payload")
        key, trace = idempotency_key(call.headers), trace_context(call.headers)
        job = self._new_job(body, call, key, trace)
        (submitted,) = await submit_with_retry(self._queue, [job])
        check_stored(submitted)
        return await self._accepted(call, job, submitted)

    async def _create_all(self, items: Sequence[NewPlaneJob], call: Call) -> Answer:
        """Answers are per job: one that is refused harms no other."""
        jobs = [self._new_job(item, call, item.idempotency_key, item.trace) for item in items]
        return Answer(
            200, SubmitResults(await submit_with_retry(self._queue, jobs) if jobs else [])
        )

    async def read(self, call: Call) -> Answer:
        """The job with its JSON fields decoded, and its attempts."""
        return Answer(200, await self._view(call))

    async def follow(self, call: Call) -> Answer | Follow:
        """The job's events after a position; 204 if none can follow, which ends a client."""
        after = call.headers.get("last-event-id", "") or call.query.last_event_id
        check_position(after)
        record = await self._record(call)
        ended = after and record.state in MACHINE.final
        if ended and not await self._ledger.events(record.job_id, after=after, limit=1):
            return Answer(204)
        masked = not call.caller.owns(record.requester)
        return Follow(record.job_id, record.state, after, masked, record.origin)

    async def cancel(self, call: Call) -> Answer:
        """A waiting job ends now (200); a running one through its worker (202)."""
        record = await self._record(call)
        (answer,) = await self._ledger.cancel([record.job_id])
        if answer not in ("ok", "requested"):
            raise Conflict(f"the job is {answer} and cannot be cancelled any more")
        return Answer(200 if answer == "ok" else 202, await self._view(call))

    async def _view(self, call: Call) -> PlaneJobView:
        record = await self._record(call)
        attempts = await self._ledger.attempts(record.job_id)
        if not call.caller.owns(record.requester):
            errors = [each["error"].encode() for each in attempts]
            masked = await self._redaction.in_thread_if_large(
                sum(map(len, errors)), lambda: [self._redaction.error(each) for each in errors]
            )
            attempts = [
                {**each, "error": error.decode()}
                for each, error in zip(attempts, masked, strict=True)
            ]
        return job_view(record, attempts)

    async def _accepted(self, call: Call, job: NewJob, submitted: Submitted) -> Answer:
        headers = [("location", f"/v1/plane/jobs/{submitted.job_id}")]
        if submitted.status == "replayed" and submitted.job_id != job.job_id:
            headers.append(("idempotency-replayed", "true"))
        record = await self._ledger.get(submitted.job_id)
        if record is None:  # it has ended and was removed in the meantime
            raise _unknown()
        shown = await self._redaction.shown(record, call.caller)
        return Answer(202, job_view(shown, []), tuple(headers))

    async def _record(self, call: Call) -> JobRecord:
        job_id = call.path["job_id"]
        record = await self._ledger.get(job_id) if _JOB_ID.fullmatch(job_id) else None
        if record is None or not call.reaches(record.requester, job_id):
            raise _unknown()
        streams = call.caller.streams
        if streams and record.queue not in streams:
            raise _unknown()
        return await self._redaction.shown(record, call.caller)

    def _new_job(self, body: Any, call: Call, key: str, trace: str) -> NewJob:
        _check_streams(call.caller, [body.stream or self._ledger.default_stream])
        job_id = body.job_id or uuid7()
        requester = getattr(body, "requester", "")
        if requester and not call.reaches(requester, job_id):
            raise Refused("scope", "only an admin may submit in another requester's name")
        try:
            payload = bytes(body.payload)
            payload.decode()
        except UnicodeDecodeError as error:
            raise Refused("bad_json", f"the body is not UTF-8: {error}") from None
        return NewJob(
            task=body.task,
            payload=payload,
            job_id=job_id,
            idempotency_key=key,
            requester=requester or call.caller.requester,
            priority=body.priority,
            delay_ms=body.delay_ms,
            max_attempts=body.max_attempts,
            ttl_ms=body.ttl_ms,
            gid=body.gid,
            trace=trace,
            options={"stream": body.stream} if body.stream else {},
        )

    def endpoints(self) -> list[Endpoint]:
        """The endpoints for the gateway."""
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
                    200: Reply("What became of each job of the list.", SubmitResults),
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
                    200: Reply("A stream of events.", PlaneJobNews, media=STREAM),
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
                    202: Reply("The job is running; its worker is asked to stop it.", PlaneJobView),
                },
                problems=(404, 409),
                tag="plane",
            ),
            *NewsRoutes(self._ledger, self._ledger.news, self._redaction, self._record).endpoints(),
        ]


def _unknown() -> NotFound:
    return NotFound("there is no such job, or it was removed, or it is not yours")


class HasPlane(Protocol):
    """A queue that is a plane."""

    plane: Plane


class _WorkerRoutes:
    """The endpoints of workers."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        # The results of many jobs are many megabytes: one key reads them once at a time.
        self._turns = Turns(1, waiting_max=WAITING_MAX)
        self._reading = asyncio.Semaphore(_READING_MAX)

    async def claim(self, call: Call) -> Answer:
        """One lease, or with `max_jobs` as many as there are."""
        body: ClaimRequest = call.body
        claim = Claim(
            worker_id=body.worker_id,
            streams=_allowed(
                call.caller, self._plane.check_streams(body.streams), named=bool(body.streams)
            ),
            limit=body.max_jobs or 1,
            claim_id=body.claim_id,
            lost=tuple(body.lost),
            fresh=body.fresh,
            requester=call.caller.requester,
            is_allowed=call.is_allowed,
        )
        leases = await self._claim(call, claim, body.max_wait_ms)
        ttl_s = self._plane.options.lease_ms / 1000
        if body.max_jobs:
            jobs = [claimed_job(lease, ttl_s) for lease in leases]
            return Answer(200, ClaimResults(bool(jobs), jobs))
        if not leases:
            return Answer(200, EmptyClaimResult())
        return Answer(200, claimed_job(leases[0], ttl_s, ClaimResult))

    async def _claim(self, call: Call, claim: Claim, wait_ms: int) -> list[Lease]:
        """Claim, and give up when the client disconnects: otherwise its leases would only expire.

        Most claims under load find jobs at once, so the connection is watched only while a claim
        waits, and checked once after a claim that did not. A claim with an id is always watched:
        only the plane knows whether the same claim was sent again and now has the leases.
        """
        if call.gone is None or not wait_ms:
            return await self._plane.claim(claim)
        if not claim.claim_id:
            leases = await self._plane.claim(claim)
            if leases:
                return await self._release_if_gone(call.gone(), leases)
        claim = msgspec.structs.replace(claim, wait_ms=wait_ms, looked=not claim.claim_id)
        claiming = asyncio.ensure_future(self._plane.claim(claim))
        gone = asyncio.ensure_future(call.gone())
        try:
            await asyncio.wait((claiming, gone), return_when=asyncio.FIRST_COMPLETED)
            return claiming.result() if claiming.done() else []
        finally:
            gone.cancel()
            if not claiming.done():
                claiming.cancel()
                await asyncio.gather(claiming, return_exceptions=True)

    async def _release_if_gone(self, gone: Awaitable[None], leases: list[Lease]) -> list[Lease]:
        """The leases, or [] after releasing them if the client has disconnected."""
        waiting = gone.__await__()
        try:
            next(waiting)  # runs until it would wait, which it does while the client is connected
        except StopIteration:
            await self._plane.settle([Outcome(lease, "release") for lease in leases])
            return []
        waiting.close()
        return leases

    async def heartbeat(self, call: Call) -> Answer:
        """Extend one lease, or those of a list."""
        body: HeartbeatRequest = call.body
        if body.leases is not None:
            return Answer(200, HeartbeatResults(await self._extend(body.leases, call.caller, body)))
        require(body, "job_id", "lease_token")
        lease = batch_item(body, LeaseRef)
        return Answer(200, (await self._extend([lease], call.caller, body))[0])

    async def _extend(
        self, refs: Sequence[LeaseRef], caller: Caller, body: HeartbeatRequest
    ) -> list[HeartbeatResult]:
        leases = await self._leases(refs, caller)
        known = [lease for lease in leases if lease is not None]
        _check_streams(caller, {lease.queue for lease in known})
        answers = iter(await self._plane.extend(known, always=not body.if_short))
        return [
            HeartbeatResult(ok=False, reason="there is no such job")
            if lease is None
            else heartbeat_result(next(answers))
            for lease in leases
        ]

    async def _leases(self, refs: Sequence[LeaseRef], caller: Caller) -> list[Lease | None]:
        """The leases meant; None for a job that does not exist.

        The plane looks up the stream and the attempt of references that lack one of them. For a
        key that is good for some streams, jobs of other streams do not exist.
        """
        found = await self._plane.latest_leases(
            [ref.job_id for ref in refs if not _is_complete(ref)]
        )
        leases: list[Lease | None] = []
        for ref in refs:
            stream, _ = stream_and_message(ref.stream)
            fence = -1
            if not _is_complete(ref):
                latest = found.get(ref.job_id)
                if latest is None or (caller.streams and latest.stream not in caller.streams):
                    leases.append(None)
                    continue
                stream, fence = latest.stream, latest.fence
            if ref.attempt_id:
                fence = fence_of(ref.job_id, ref.attempt_id)
            leases.append(partial_lease(ref.job_id, fence, ref.lease_token, stream))
        return leases

    async def complete(self, call: Call) -> Answer:
        """End one attempt, or those of a list."""
        body: CompleteRequest = call.body
        if body.jobs is not None:
            results = await self._settle(map(completed_outcome, body.jobs), call)
            return Answer(200, SettleResults(results))
        require(body, "job_id", "attempt_id", "lease_token", "stream")
        outcome = completed_outcome(batch_item(body, CompletedJob))
        return Answer(200, (await self._settle([outcome], call))[0])

    async def fail(self, call: Call) -> Answer:
        """End one attempt that did not succeed, or those of a list."""
        body: FailRequest = call.body
        if body.jobs is not None:
            results = await self._settle(map(failed_outcome, body.jobs), call)
            return Answer(200, SettleResults(results))
        require(body, "job_id", "attempt_id", "lease_token", "stream")
        if body.error is None and body.kind == "fail":
            raise Refused(
                "invalid", "error is missing: {code, message, stack, retryable}", field="error"
            )
        outcome = failed_outcome(batch_item(body, FailedJob))
        return Answer(200, (await self._settle([outcome], call))[0])

    async def _settle(self, given: Iterable[Outcome], call: Call) -> list[SettleResult]:
        outcomes = list(given)
        _check_streams(call.caller, {outcome.lease.queue for outcome in outcomes})
        verdicts = await self._plane.settle(outcomes)
        lost = [
            outcome.lease
            for outcome, verdict in zip(outcomes, verdicts, strict=True)
            if isinstance(verdict, LeaseLost)
        ]
        superseded = iter(await self._plane.are_superseded(lost))
        return [
            # P-16: a late call is refused, but its message may be acknowledged.
            SettleResult(ok=False, ack=next(superseded), verdict="lost", reason=verdict.reason)
            if isinstance(verdict, LeaseLost)
            else _settle_result(verdict)
            for verdict in verdicts
        ]

    async def report(self, call: Call) -> Answer:
        """Store reports of running attempts."""
        body: ReportRequest = call.body
        reports = [report_of(item) for item in body.reports]
        _check_streams(call.caller, {report.lease.queue for report in reports})
        results = [
            ReportResult(ok=lost is None, reason="" if lost is None else lost.reason)
            for lost in await self._plane.report(reports)
        ]
        return Answer(200, ReportResults(results))

    async def children(self, call: Call) -> Answer:
        """The results of the jobs that a running job waited for."""
        lease = lease_of(call.body)
        _check_streams(call.caller, {lease.queue})
        async with in_turn(self._turns, call), self._reading:
            try:
                found = await self._plane.children_results(lease)
            except LeaseLost as lost:
                return Answer(200, ChildrenResult(ok=False, reason=lost.reason))
            shown = await asyncio.to_thread(_shown, found)
        return Answer(200, ChildrenResult(ok=True, results=shown), only_reads=True)

    async def upkeep(self, call: Call) -> Answer:
        """A round of upkeep now."""
        body: UpkeepRequest = call.body
        streams = _allowed(call.caller, self._plane.streams, named=False)
        done = await self._plane.upkeep(body.worker_id, slots=body.slots, streams=streams)
        return Answer(200, done)

    def endpoints(self) -> list[Endpoint]:
        """The endpoints for the gateway."""
        claim_reply = ClaimResult | ClaimResults | EmptyClaimResult
        heartbeat_reply = HeartbeatResult | HeartbeatResults
        settle_reply = SettleResult | SettleResults
        rows = [
            ("claim", "Take a job, or several", self.claim, ClaimRequest, claim_reply),
            ("heartbeat", "Keep a lease", self.heartbeat, HeartbeatRequest, heartbeat_reply),
            ("complete", "End with a result", self.complete, CompleteRequest, settle_reply),
            ("fail", "End without a result", self.fail, FailRequest, settle_reply),
            ("report", "Publish news of an attempt", self.report, ReportRequest, ReportResults),
            (
                "children",
                "Read the results a job waited for",
                self.children,
                ChildrenRequest,
                ChildrenResult,
            ),
            ("upkeep", "Do what is due now", self.upkeep, UpkeepRequest, Upkeep),
        ]
        return [_worker_endpoint(*row) for row in rows]


def _shown(results: dict[str, str]) -> dict[str, Any]:
    return {name: answer_json(text.encode()) for name, text in results.items()}


def _is_complete(ref: LeaseRef) -> bool:
    """Whether a reference has all that proves a lease."""
    return bool(stream_and_message(ref.stream)[0] and ref.attempt_id)


def _settle_result(verdict: Verdict) -> SettleResult:
    return SettleResult(
        ok=True,
        ack=True,
        requeued=isinstance(verdict, Retried | Released),
        dlq=isinstance(verdict, Buried | Cancelled),
        verdict=VERDICT_NAMES[type(verdict)],
        due_ms=verdict.due_ms if isinstance(verdict, Retried) else 0,
    )


def _worker_endpoint(name: str, summary: str, handle: Any, takes: Any, reply: Any) -> Endpoint:
    return Endpoint(
        method="POST",
        path=f"/internal/worker/{name}",
        operation=f"worker{name.capitalize()}",
        summary=summary,
        right=Right("jobs:work", "leased", does=name, audit="history", streams=True),
        handle=handle,
        takes=takes,
        replies={200: Reply("The answer; in its batch form per item and in order.", reply)},
        problems=_PROBLEMS,
        tag="worker",
        bytes_max=BODY_BYTES_MAX,
    )


def _allowed(caller: Caller, streams: tuple[str, ...], *, named: bool) -> tuple[str, ...]:
    """The streams that a caller may use; those that it `named` itself must all be allowed."""
    if not caller.streams:
        return streams
    if named:
        _check_streams(caller, streams)
        return streams
    allowed = tuple(stream for stream in streams if stream in caller.streams)
    if not allowed:
        raise Refused("scope", "this key is good for none of the plane's streams")
    return allowed


def _check_streams(caller: Caller, streams: Iterable[str]) -> None:
    """Refuse a stream that the caller's key is not good for."""
    allowed = caller.streams
    for stream in streams:
        if allowed and stream not in allowed:
            raise Refused(
                "scope",
                f"this key is good for {', '.join(sorted(allowed))}, not for {stream[:120]!r}",
            )


def open_routes(
    queue: Submits, ledger: PlaneLedger, *, ttl_s: int, redaction: Redaction, **_unused: object
) -> list[Endpoint]:
    """The endpoints of producers."""
    return _JobRoutes(queue, ledger, redaction).endpoints()


def open_worker_routes(queue: HasPlane) -> list[Endpoint]:
    """The endpoints of workers."""
    plane = queue.plane
    schedules = ScheduleRoutes(plane.schedules, plane.streams, _check_streams)
    return _WorkerRoutes(plane).endpoints() + schedules.endpoints()
