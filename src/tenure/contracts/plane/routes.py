"""The HTTP side of the contract: the workers' verbs under /internal/worker, and /v1/plane/jobs.

These are meanings and shapes; the gateway that serves them has admitted the caller, checked the
body and will word the errors. Workers need the scope `jobs:work`; a key that also has scopes such
as `stream:mail` is good for these streams alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

import msgspec

from tenure.contracts.plane.asking import Ask
from tenure.contracts.plane.bodies import (
    claimed,
    completed,
    failed,
    kept,
    named,
    reported,
    require,
    single,
    stream_and_message,
)
from tenure.contracts.plane.enqueueing import Jobs
from tenure.contracts.plane.ledger import PlaneLedger
from tenure.contracts.plane.plane import Plane
from tenure.contracts.plane.scoping import allowed, check_allowed
from tenure.contracts.plane.shapes import (
    BODY_BYTES_MAX,
    Claimed,
    ClaimedJobs,
    ClaimRequest,
    CompletedJob,
    CompleteRequest,
    Ended,
    EndedResults,
    FailedJob,
    FailRequest,
    HeartbeatRequest,
    HeldLease,
    Kept,
    KeptResults,
    ReportRequest,
    Results,
    ToldResults,
    Unclaimed,
    UpkeepRequest,
)
from tenure.contracts.plane.words import fence_of
from tenure.core.endpoint import Answer, Call, Caller, Endpoint, Refused, Reply, Right, Submits
from tenure.core.errors import LeaseLost
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
