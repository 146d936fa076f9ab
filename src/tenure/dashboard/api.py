"""/api for every contract: the same answers as the pages, for programs.

Reading needs the scope `observe` (the backlog `metrics`), acting needs `admin`; a key with
`jobs:read` alone sees its own jobs through /v1 and none here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tenure.core.endpoint import (
    Answer,
    Call,
    Endpoint,
    Handle,
    Refused,
    Reply,
    Right,
    Scope,
)
from tenure.core.errors import Conflict, NotFound
from tenure.core.job import JobRecord, NewJob
from tenure.core.redacting import Redaction
from tenure.dashboard.acting import Actor, Bulk, Verb
from tenure.dashboard.audit import Entry
from tenure.dashboard.finding import COUNT_MAX, Finder
from tenure.dashboard.gathering import backlog, dead_letters, workers
from tenure.dashboard.house import Street
from tenure.dashboard.search import Search, parse
from tenure.dashboard.shapes import (
    ActionAnswers,
    Backlog,
    BulkBody,
    CountView,
    DeadList,
    EventList,
    Ids,
    JobFull,
    JobList,
    NewJobBody,
    SubmittedJob,
    WorkerList,
    event_line,
    job_full,
    job_line,
)
from tenure.dashboard.visit import Searches
from tenure.dashboard.watching import Figures, Watch

_CATCH_UP_S = 2.0
_EVENT_ID = re.compile(r"[0-9]{1,18}(-[0-9]{1,18})?")
_Q = Annotated[str, Meta(description="A search, such as `queue:mail is:failed since:2h`.")]


class FindJobs(msgspec.Struct, frozen=True):
    """Query of the list."""

    q: _Q = ""
    after: Annotated[
        str, Meta(pattern="^[A-Za-z0-9_-]*$", description="The `after` of the page before.")
    ] = ""
    limit: Annotated[int, Meta(ge=1, le=500, description="How many at most.")] = 50


class CountJobs(msgspec.Struct, frozen=True):
    """Query of the count."""

    q: _Q = ""


class ReadEvents(msgspec.Struct, frozen=True):
    """Query of the events."""

    after: Annotated[
        str,
        Meta(
            description="The id of the last event seen.",
            extra_json_schema={"pattern": f"^({_EVENT_ID.pattern})?$"},
        ),
    ] = ""
    limit: Annotated[
        int, Meta(ge=1, le=1000, description="How many at most; fewer where they carry 4 MiB.")
    ] = 200


class Scale(msgspec.Struct, frozen=True):
    """Query of the backlog."""

    per_worker: Annotated[
        int, Meta(ge=1, le=100_000, description="Jobs that one worker shall have.")
    ] = 10


class ReadAudit(msgspec.Struct, frozen=True):
    """Query of the audit log."""

    before: Annotated[
        str,
        Meta(
            pattern="^([0-9]{1,15}(-[0-9]{1,10})?)?$",
            description="The id of the last entry seen.",
        ),
    ] = ""
    limit: Annotated[int, Meta(ge=1, le=500, description="How many at most.")] = 100


class AuditList(msgspec.Struct, frozen=True):
    """Entries, newest first."""

    entries: list[Entry]


class StatsView(msgspec.Struct, frozen=True):
    """The last five minutes, all queues together and each; durations p50, p95, p99."""

    total: Figures
    queues: dict[str, Figures]


class Api:
    """The endpoints."""

    def __init__(
        self,
        street: Street,
        finder: Finder,
        actor: Actor,
        watch: Watch,
        redaction: Redaction,
        searches: Searches,
    ) -> None:
        self._searches = searches
        self._street = street
        self._finder = finder
        self._actor = actor
        self._watch = watch
        self._redaction = redaction

    async def find(self, call: Call) -> Answer:
        """Jobs of all queues."""
        asked: FindJobs = call.query
        found = await self._finder.page(_search(asked.q), after=asked.after, limit=asked.limit)
        lines = [job_line(each.queue, each.job) for each in found.jobs]
        return Answer(200, JobList(lines, found.after, found.complete))

    async def count(self, call: Call) -> Answer:
        """How many match."""
        count = await self._finder.count(_search(call.query.q), scan_max=COUNT_MAX)
        return Answer(200, CountView(count.jobs, count.exact))

    async def read(self, call: Call) -> Answer:
        """One job."""
        queue = call.path["queue"]
        job = await self._street[queue].ledger.get(call.path["job_id"])
        if job is None:
            raise NotFound("there is no such job (any more)")
        shown = job if _is_own(call, job) else await self._redaction.seen(job)
        return Answer(200, job_full(queue, shown))

    async def events(self, call: Call) -> Answer:
        """Its events."""
        ledger = self._street[call.path["queue"]].ledger
        asked: ReadEvents = call.query
        if asked.after and not _EVENT_ID.fullmatch(asked.after):
            raise Refused(
                "bad_cursor", "`after` is the id of an event, such as 3 or 1700000000000-0"
            )
        job_id = call.path["job_id"]
        events = await ledger.events(job_id, after=asked.after, limit=asked.limit)
        job = await ledger.get(job_id)
        if job is None or not _is_own(call, job):
            events = await self._redaction.events(events)
        return Answer(200, EventList([event_line(event) for event in events]))

    async def submit(self, call: Call) -> Answer:
        """A new job for any queue."""
        body: NewJobBody = call.body
        queue = call.path["queue"]
        payload = {} if body.payload is msgspec.UNSET else body.payload
        job = NewJob(
            task=body.task,
            payload=msgspec.json.encode(payload),
            job_id=body.job_id,
            priority=body.priority,
            delay_ms=body.delay_ms,
            max_attempts=body.max_attempts,
            gid=body.gid,
            requester=call.caller.requester,
        )
        made = await self._actor.submit(call.caller.who, queue, job)
        status = 201 if made.status == "created" else 200
        return Answer(status, SubmittedJob(queue, made.job_id, made.status))

    async def bulk(self, call: Call) -> Answer:
        """Begin an action on a search."""
        body: BulkBody = call.body
        search = _search(body.q)
        if body.expect is not None:
            count = await self._finder.count(search)
            if count.jobs > body.expect:
                raise Conflict(f"{count.jobs} jobs match by now, not {body.expect}: look again")
        return Answer(202, await self._actor.begin(call.caller.who, body.action, search))

    async def bulk_state(self, call: Call) -> Answer:
        """How far it is."""
        return Answer(200, self._actor.bulk(call.path["bulk_id"]))

    async def bulk_stop(self, call: Call) -> Answer:
        """Stop it."""
        return Answer(200, await self._actor.stop(call.caller.who, call.path["bulk_id"]))

    async def workers(self, call: Call) -> Answer:
        """Who works."""
        self._watch.touch()
        return Answer(200, WorkerList(await workers(self._street, self._finder, self._watch)))

    async def dead(self, call: Call) -> Answer:
        """Dead letters by error class."""
        return Answer(200, await dead_letters(self._finder, scan_max=COUNT_MAX))

    async def stats(self, call: Call) -> Answer:
        """The last five minutes."""
        self._watch.touch()
        await self._watch.caught_up(within_s=_CATCH_UP_S)
        queues = {name: self._watch.figures(name) for name in self._watch.observers}
        return Answer(200, StatsView(self._watch.figures(), queues))

    async def autoscale(self, call: Call) -> Answer:
        """Backlog of one queue."""
        queue = call.path["queue"]
        counts = await self._street[queue].ledger.counts()
        return Answer(200, backlog(queue, counts, per_worker=call.query.per_worker))

    async def audit(self, call: Call) -> Answer:
        """Who did what."""
        asked: ReadAudit = call.query
        entries = await self._actor.audit.list(before=asked.before, limit=asked.limit)
        return Answer(200, AuditList(entries))

    def endpoints(self) -> list[Endpoint]:
        """All of them."""
        return [*self._reading(), *self._acting()]

    def _searching(self, handle: Callable[[Call], Coroutine[Any, Any, Answer]]) -> Handle:
        async def run(call: Call) -> Answer:
            return await self._searches.run(call.caller.who, call.gone, handle(call))

        return run

    def _reading(self) -> list[Endpoint]:
        job = "/api/queues/{queue}/jobs/{job_id}"
        return [
            _get("/api/jobs", "findJobs", "Search the jobs of all queues",
                 self._searching(self.find), JobList, asks=FindJobs, problems=(409, 422)),
            _get("/api/jobs/count", "countJobs", "How many jobs match a search",
                 self._searching(self.count), CountView, asks=CountJobs, problems=(422,)),
            _get(job, "readQueueJob", "One job of a queue",
                 self._searching(self.read), JobFull, problems=(404,)),
            _get(f"{job}/events", "readQueueJobEvents", "The events of one job",
                 self._searching(self.events), EventList, asks=ReadEvents, problems=(404, 422)),
            _get("/api/workers", "listWorkers", "Workers and what they hold",
                 self._searching(self.workers), WorkerList),
            _get("/api/dead", "listDead", "Dead letters by error class",
                 self._searching(self.dead), DeadList),
            _get("/api/stats", "readStats", "Rates and durations of the last five minutes",
                 self.stats, StatsView),
            _get("/api/autoscale/{queue}", "readBacklog",
                 "Backlog of a queue, for scalers such as KEDA's metrics-api", self.autoscale,
                 Backlog, asks=Scale, problems=(404, 422), scope="metrics"),
            _get("/api/audit", "readAudit", "Who did what", self.audit, AuditList, asks=ReadAudit,
                 problems=(422,)),
            _get("/api/bulk/{bulk_id}", "readBulk", "How far an action on many jobs is",
                 self.bulk_state, Bulk, problems=(404,)),
        ]  # fmt: skip

    def _acting(self) -> list[Endpoint]:
        verbs: tuple[Verb, ...] = ("retry", "cancel", "remove")
        return [
            Endpoint(
                method="POST",
                path="/api/queues/{queue}/jobs",
                operation="submitToQueue",
                summary="Submit a job to any queue",
                right=Right("admin", "all", does="submit", audit="handler"),
                handle=self.submit,
                takes=NewJobBody,
                example={"task": "chat", "payload": {"prompt": "Say hello."}},
                replies={
                    201: Reply("Stored.", SubmittedJob),
                    200: Reply("Was there.", SubmittedJob),
                },
                problems=(400, 404, 409, 413, 415, 422),
                tag="steering",
            ),
            *(self._verb(verb) for verb in verbs),
            Endpoint(
                method="POST",
                path="/api/bulk",
                operation="beginBulk",
                summary="Retry, cancel or remove all jobs of a search, in bounded batches",
                right=Right("admin", "all", does="VERB all", audit="handler"),
                handle=self.bulk,
                takes=BulkBody,
                example={"action": "retry", "q": "is:failed error:Timeout", "expect": 10},
                replies={202: Reply("Begun.", Bulk)},
                problems=(400, 409, 413, 415, 422),
                tag="steering",
            ),
            Endpoint(
                method="POST",
                path="/api/bulk/{bulk_id}/stop",
                operation="stopBulk",
                summary="Stop an action on many jobs; what is done stays done",
                right=Right("admin", "all", does="stop VERB all", audit="handler"),
                handle=self.bulk_stop,
                replies={200: Reply("As it stands.", Bulk)},
                problems=(404,),
                tag="steering",
            ),
        ]

    def _verb(self, verb: Verb) -> Endpoint:
        async def handle(call: Call) -> Answer:
            ids: Ids = call.body
            who, queue = call.caller.who, call.path["queue"]
            answers = await self._actor.act(who, verb, queue, ids.job_ids)
            return Answer(200, ActionAnswers(dict(zip(ids.job_ids, answers, strict=True))))

        return Endpoint(
            method="POST",
            path=f"/api/queues/{{queue}}/{verb}",
            operation=f"{verb}Jobs",
            summary=f"{verb.capitalize()} jobs by id",
            right=Right("admin", "all", does=verb, audit="handler"),
            handle=handle,
            takes=Ids,
            example={"job_ids": ["1"]},
            replies={200: Reply("What became of each.", ActionAnswers)},
            problems=(400, 404, 413, 415, 422),
            tag="steering",
        )


def _is_own(call: Call, job: JobRecord) -> bool:
    """Whether a key submitted the job and asks now; a local caller without a key is masked too."""
    return bool(job.requester) and call.caller.owns(job.requester)


def _search(text: str) -> Search:
    return parse(text, now_ms=time.time_ns() // 1_000_000)


def _get(
    path: str,
    operation: str,
    summary: str,
    handle: Any,
    shape: Any,
    *,
    asks: Any = None,
    problems: tuple[int, ...] = (),
    scope: Scope = "observe",
) -> Endpoint:
    return Endpoint(
        method="GET",
        path=path,
        operation=operation,
        summary=summary,
        right=Right(scope, "all"),
        handle=handle,
        asks=asks,
        replies={200: Reply("As it is now.", shape)},
        problems=problems,
        tag="observing",
    )
