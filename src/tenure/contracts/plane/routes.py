"""The HTTP side of the contract: workers' verbs, producers' requests and administration."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from tenure.contracts.plane import MACHINE
from tenure.contracts.plane.ledger import PlaneLedger
from tenure.contracts.plane.model import Ask, fence_of
from tenure.contracts.plane.plane import Plane
from tenure.contracts.plane.schemas import (
    BODY_BYTES_MAX,
    Claimed,
    ClaimedJobs,
    ClaimRequest,
    CompletedJob,
    CompleteRequest,
    CreatePlaneJobs,
    Ended,
    EndedResults,
    EventId,
    FailedJob,
    FailRequest,
    FollowPlaneJob,
    HeartbeatRequest,
    HeldLease,
    Kept,
    KeptResults,
    NewPlaneJob,
    PlaneJobNews,
    PlaneJobView,
    ReportRequest,
    Results,
    StoredResults,
    ToldResults,
    Unclaimed,
    UpkeepRequest,
    claimed,
    completed,
    failed,
    kept,
    named,
    reported,
    require,
    single,
    stream_and_message,
    view,
)
from tenure.core.endpoint import (
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
    Buried,
    Cancelled,
    Completed,
    Outcome,
    Released,
    Retried,
    Verdict,
)
from tenure.core.redaction import Redaction
from tenure.core.seam import Upkeep
from tenure.sql.submit import uuid7
from tenure.store.resend import submit_surely


def allowed(caller: Caller, streams: tuple[str, ...], named: bool) -> tuple[str, ...]:
    """The streams asked for by name must all be allowed; of all streams those that are."""
    names = caller.streams
    if not names:
        return streams
    if named:
        check_allowed(caller, streams)
        return streams
    mine = tuple(stream for stream in streams if stream in names)
    if not mine:
        raise Refused("scope", "this key is good for none of the plane's streams")
    return mine


def check_allowed(caller: Caller, streams: Iterable[str]) -> None:
    """Refuse a stream that the caller's key is not good for."""
    names = caller.streams
    for stream in streams:
        if names and stream not in names:
            raise Refused(
                "scope",
                f"this key is good for {', '.join(sorted(names))}, not for {stream[:120]!r}",
            )


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


_PROBLEMS = (400, 403, 408, 413, 415, 422)
_VERDICTS: dict[type, tuple[str, bool, bool]] = {
    Completed: ("completed", False, False),
    Retried: ("retried", True, False),
    Released: ("released", True, False),
    Buried: ("buried", False, True),
    Cancelled: ("cancelled", False, True),
}


class HasPlane(Protocol):
    """A queue that is a plane."""

    plane: Plane


class WorkerRoutes:
    """The verbs of the workers."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def claim(self, call: Call) -> Answer:
        """The contract's single form, or with `max_jobs` as many leases as there are."""
        asked: ClaimRequest = call.body
        ask = Ask(
            worker_id=asked.worker_id,
            streams=allowed(call.caller, self._plane.served(asked.streams), bool(asked.streams)),
            limit=asked.max_jobs or 1,
            claim_id=asked.claim_id,
            lost=tuple(asked.lost),
            fresh=asked.fresh,
            requester=call.caller.requester,
        )
        leases = await self._waited(call, ask, asked.max_wait_ms)
        ttl_s = self._plane.options.lease_ms / 1000
        if asked.max_jobs:
            return Answer(200, ClaimedJobs(bool(leases), [claimed(each, ttl_s) for each in leases]))
        if not leases:
            return Answer(200, Unclaimed())
        return Answer(200, claimed(leases[0], ttl_s, Claimed))

    async def _waited(self, call: Call, ask: Ask, wait_ms: int) -> list[Lease]:
        """The claim, given up when the client hangs up: nobody would keep what it took.

        Most claims under load find something at once: who waits is watched, who need not is looked
        after when it is done. One that can be sent again is always watched: only the plane knows
        whether what it gives back has been asked for again.
        """
        if call.gone is None or not wait_ms:
            return await self._plane.claim(ask)
        if not ask.claim_id:
            leases = await self._plane.claim(ask)
            if leases:
                return await self._kept_by(call.gone(), leases)
        ask = msgspec.structs.replace(ask, wait_ms=wait_ms, looked=not ask.claim_id)
        claiming = asyncio.ensure_future(self._plane.claim(ask))
        gone = asyncio.ensure_future(call.gone())
        try:
            await asyncio.wait((claiming, gone), return_when=asyncio.FIRST_COMPLETED)
            if claiming.done():
                return claiming.result()
            return []
        finally:
            gone.cancel()
            if not claiming.done():
                claiming.cancel()
                await asyncio.gather(claiming, return_exceptions=True)

    async def _kept_by(self, gone: Awaitable[None], leases: list[Lease]) -> list[Lease]:
        """The leases, unless the client has hung up meanwhile: then they go back."""
        asking = gone.__await__()
        try:
            next(asking)  # it stops where it would wait, if the client is there
        except StopIteration:
            await self._plane.settle([Outcome(lease, "release") for lease in leases])
            return []
        asking.close()
        return leases

    async def heartbeat(self, call: Call) -> Answer:
        """Keep one lease, or those of a list."""
        asked: HeartbeatRequest = call.body
        if asked.leases is not None:
            return Answer(200, Results(await self._kept(asked.leases, call.caller, asked)))
        require(asked, "job_id", "lease_token")
        one = HeldLease(
            job_id=asked.job_id,
            lease_token=asked.lease_token,
            attempt_id=asked.attempt_id,
            stream=asked.stream,
        )
        return Answer(200, (await self._kept([one], call.caller, asked))[0])

    async def _kept(
        self, held: Sequence[HeldLease], caller: Caller, asked: HeartbeatRequest
    ) -> list[Kept]:
        leases = [await self._held(each, caller) for each in held]
        known = [lease for lease in leases if lease is not None]
        check_allowed(caller, {lease.queue for lease in known})
        answers = iter(await self._plane.extend(known, always=not asked.if_short))
        return [
            Kept(ok=False, reason="there is no such job") if lease is None else kept(next(answers))
            for lease in leases
        ]

    async def _held(self, held: HeldLease, caller: Caller) -> Lease | None:
        """The lease meant; what the contract's heartbeat does not say is looked up.

        A key for some streams does not learn of jobs in others.
        """
        stream, _ = stream_and_message(held.stream)
        if stream and held.attempt_id:
            fence = fence_of(held.job_id, held.attempt_id)
            return named(held.job_id, fence, held.lease_token, stream)
        found = await self._plane.latest(held.job_id)
        if found is None:
            return None
        stream, fence = found
        if caller.streams and stream not in caller.streams:
            return None
        if held.attempt_id:
            fence = fence_of(held.job_id, held.attempt_id)
        return named(held.job_id, fence, held.lease_token, stream)

    async def complete(self, call: Call) -> Answer:
        """End one attempt, or those of a list."""
        asked: CompleteRequest = call.body
        if asked.jobs is not None:
            return Answer(200, Results(await self._ended(map(completed, asked.jobs), call)))
        require(asked, "job_id", "attempt_id", "lease_token", "stream")
        one = completed(single(asked, CompletedJob))
        return Answer(200, (await self._ended([one], call))[0])

    async def fail(self, call: Call) -> Answer:
        """End one attempt that did not succeed, or those of a list."""
        asked: FailRequest = call.body
        if asked.jobs is not None:
            return Answer(200, Results(await self._ended(map(failed, asked.jobs), call)))
        require(asked, "job_id", "attempt_id", "lease_token", "stream")
        if asked.error is None and asked.kind == "fail":
            raise Refused(
                "invalid", "error is missing: {code, message, stack, retryable}", field="error"
            )
        one = failed(single(asked, FailedJob))
        return Answer(200, (await self._ended([one], call))[0])

    async def _ended(self, outcomes: Any, call: Call) -> list[Ended]:
        given: list[Outcome] = list(outcomes)
        check_allowed(call.caller, {outcome.lease.queue for outcome in given})
        verdicts = await self._plane.settle(given)
        return [
            await self._told(outcome, verdict)
            for outcome, verdict in zip(given, verdicts, strict=True)
        ]

    async def _told(self, outcome: Outcome, verdict: Verdict) -> Ended:
        """P-16: a late call is refused, but its message is superseded and may go."""
        if isinstance(verdict, LeaseLost):
            superseded = await self._plane.is_superseded(outcome.lease)
            return Ended(ok=False, ack=superseded, verdict="lost", reason=verdict.reason)
        word, requeued, dlq = _VERDICTS[type(verdict)]
        due_ms = verdict.due_ms if isinstance(verdict, Retried) else 0
        return Ended(ok=True, ack=True, requeued=requeued, dlq=dlq, verdict=word, due_ms=due_ms)

    async def report(self, call: Call) -> Answer:
        """Publish news of running attempts."""
        asked: ReportRequest = call.body
        reports = [reported(each) for each in asked.reports]
        check_allowed(call.caller, {report.lease.queue for report in reports})
        answers = await self._plane.report(reports)
        return Answer(
            200,
            Results(
                [
                    {"ok": answer is None, "reason": "" if answer is None else answer.reason}
                    for answer in answers
                ]
            ),
        )

    async def upkeep(self, call: Call) -> Answer:
        """A round of upkeep now."""
        asked: UpkeepRequest = call.body
        streams = allowed(call.caller, self._plane.streams, named=False)
        done = await self._plane.upkeep(asked.worker_id, slots=asked.slots, streams=streams)
        return Answer(200, done)

    def endpoints(self) -> list[Endpoint]:
        """What the gateway shall serve."""
        return [
            _verb(
                "claim",
                "Take a job, or several",
                self.claim,
                ClaimRequest,
                Claimed | ClaimedJobs | Unclaimed,
            ),
            _verb(
                "heartbeat", "Keep a lease", self.heartbeat, HeartbeatRequest, Kept | KeptResults
            ),
            _verb(
                *("complete", "End with a result", self.complete),
                *(CompleteRequest, Ended | EndedResults),
            ),
            _verb("fail", "End without", self.fail, FailRequest, Ended | EndedResults),
            _verb("report", "Publish news of an attempt", self.report, ReportRequest, ToldResults),
            _verb("upkeep", "Do what is due now", self.upkeep, UpkeepRequest, Upkeep),
        ]


def _verb(name: str, summary: str, handle: Any, takes: Any, gives: Any) -> Endpoint:
    return Endpoint(
        method="POST",
        path=f"/internal/worker/{name}",
        operation=f"worker{name.capitalize()}",
        summary=summary,
        right=Right("jobs:work", "leased", does=name, audit="history", streams=True),
        handle=handle,
        takes=takes,
        replies={200: Reply("The answer; in its batch form per item and in order.", gives)},
        problems=_PROBLEMS,
        tag="worker",
        bytes_max=BODY_BYTES_MAX,
    )


def open_routes(
    queue: Submits, ledger: PlaneLedger, *, ttl_s: int, redaction: Redaction, **_lent: object
) -> list[Endpoint]:
    """The endpoints of the producers."""
    return Jobs(queue, ledger, redaction).endpoints()


def open_worker_routes(queue: HasPlane) -> list[Endpoint]:
    """The endpoints of the workers."""
    return WorkerRoutes(queue.plane).endpoints()
