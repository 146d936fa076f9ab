"""/api for every contract: what the pages show, for programs.

Reading needs the scope `observe` (the backlog: `metrics`), changes need `admin`. A key with only
`jobs:read` sees its own jobs through /v1 and none here.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from tenure.core.endpoint import Answer, Call, Endpoint, Handle, Refused, Reply, Right, Scope
from tenure.core.errors import Conflict, NotFound
from tenure.core.job import JobRecord, NewJob
from tenure.core.redaction import Redaction
from tenure.dashboard.actions import VERBS, Actions, Bulk, Verb
from tenure.dashboard.audit import AuditEntry
from tenure.dashboard.finder import COUNT_MAX, CountView, JobFinder
from tenure.dashboard.queues import QueueRegistry
from tenure.dashboard.search import parse_now
from tenure.dashboard.views import (
    ActionAnswers,
    Backlog,
    BulkBody,
    DeadList,
    Deliveries,
    EventList,
    Ids,
    JobFull,
    JobList,
    NewJobBody,
    ScheduleList,
    SubmittedJob,
    WorkerList,
    backlog,
    dead_letters,
    deliveries,
    event_row,
    job_full,
    job_row,
    outboxes,
    schedules,
    workers,
)
from tenure.dashboard.watch import Figures, JournalWatch

T = TypeVar("T")

ROUTE = "tenure.route"  # scope key: the path template, for the metrics
BASE = "tenure.base"  # scope key: the prefix under which an application serves the gateway
_CATCH_UP_S = 2.0
_SEARCHES_MAX = 8
_WITH_BODY = (400, 404, 413, 415, 422)
_EVENT_ID = re.compile(r"[0-9]{1,18}(-[0-9]{1,18})?")
_Q = Annotated[str, Meta(description="A search, such as `queue:mail is:failed since:2h`.")]
_EventId = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\x00]*$")]


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

    per_worker: Annotated[int, Meta(ge=1, le=100_000, description="Jobs per worker.")] = 10


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


class ReadOutbox(msgspec.Struct, frozen=True):
    """Query of the events."""

    kind: Annotated[
        Literal["", "waiting", "done", "failed"],
        Meta(description="Only events that wait, were delivered, or failed for good."),
    ] = ""
    after: Annotated[
        str, Meta(pattern="^[0-9]{0,18}$", description="The `after` of the page before.")
    ] = ""
    limit: Annotated[int, Meta(ge=1, le=500, description="How many at most.")] = 50


class RedeliverBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Events by id."""

    event_ids: Annotated[list[_EventId], Meta(min_length=1, max_length=500)]


class AuditList(msgspec.Struct, frozen=True):
    """Entries, newest first."""

    entries: list[AuditEntry]


class OutboxList(msgspec.Struct, frozen=True):
    """The queues that have an outbox."""

    queues: list[str]


class StatsView(msgspec.Struct, frozen=True):
    """The last five minutes, all queues together and each; durations p50, p95, p99."""

    total: Figures
    queues: dict[str, Figures]


async def until_disconnected(receive: Receive) -> None:
    """Return when the client has disconnected; its request body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_while_connected(
    work: Coroutine[Any, Any, T], gone: Callable[[], Awaitable[None]] | None
) -> T:
    """The result of the work. If `gone` returns first, the work is cancelled.

    `ClientDisconnect` is raised then.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(gone()) if gone else asyncio.Future[None]()
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class SearchLimit:
    """Limits how many searches one key runs at a time."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()

    async def run(
        self, who: str, gone: Callable[[], Awaitable[None]] | None, work: Coroutine[Any, Any, T]
    ) -> T:
        """The result of a search, which is cancelled when its client disconnects."""
        try:
            with self.slot(who):
                return await run_while_connected(work, gone)
        finally:
            work.close()

    @contextmanager
    def slot(self, who: str) -> Iterator[None]:
        """Hold one of the slots of a key, or raise `Refused`."""
        if self.running[who] >= _SEARCHES_MAX:
            raise Refused(
                "too_many_searches",
                f"this key runs {_SEARCHES_MAX} searches: wait for their answers",
            )
        self.running[who] += 1
        try:
            yield
        finally:
            self.running[who] -= 1
            if not self.running[who]:
                del self.running[who]


class Api:
    """The handlers of /api."""

    def __init__(
        self,
        queues: QueueRegistry,
        finder: JobFinder,
        actions: Actions,
        watch: JournalWatch,
        redaction: Redaction,
    ) -> None:
        self._queues = queues
        self._finder = finder
        self._actions = actions
        self._watch = watch
        self._redaction = redaction

    def endpoints(self) -> list[Endpoint]:
        """All endpoints, for the router and the API document."""
        return [*self._read_endpoints(), *self._action_endpoints(), *self._outbox_endpoints()]

    def _read_endpoints(self) -> list[Endpoint]:
        job = "/api/queues/{queue}/jobs/{job_id}"
        return [
            _get("/api/jobs", "findJobs", "Search the jobs of all queues",
                 self._find, JobList, asks=FindJobs, problems=(409, 422)),
            _get("/api/jobs/count", "countJobs", "How many jobs match a search",
                 self._count, CountView, asks=CountJobs, problems=(422,)),
            _get(job, "readQueueJob", "One job of a queue",
                 self._job, JobFull, problems=(404,)),
            _get(f"{job}/events", "readQueueJobEvents", "The events of one job",
                 self._events, EventList, asks=ReadEvents, problems=(404, 422)),
            _get("/api/workers", "listWorkers", "Workers and their running jobs",
                 self._workers, WorkerList),
            _get("/api/schedules", "listSchedules", "Schedules, the next one due first",
                 self._schedules, ScheduleList),
            _get("/api/dead", "listDead", "Dead letters by error class",
                 self._dead, DeadList),
            _get("/api/stats", "readStats", "Rates and durations of the last five minutes",
                 self._stats, StatsView),
            _get("/api/autoscale/{queue}", "readBacklog",
                 "Backlog of a queue, for scalers such as KEDA's metrics-api", self._backlog,
                 Backlog, asks=Scale, problems=(404, 422), scope="metrics"),
            _get("/api/audit", "readAudit", "The audit log, newest first",
                 self._audit, AuditList, asks=ReadAudit, problems=(422,)),
            _get("/api/bulk/{bulk_id}", "readBulk", "The progress of an action on many jobs",
                 self._bulk_state, Bulk, problems=(404,), is_search=False),
        ]  # fmt: skip

    def _action_endpoints(self) -> list[Endpoint]:
        stored = {
            201: Reply("Stored.", SubmittedJob),
            200: Reply("It was stored before.", SubmittedJob),
        }
        answered = {200: Reply("The result for each job.", ActionAnswers)}
        return [
            _post("/api/queues/{queue}/jobs", "submitToQueue", "Submit a job to any queue",
                  self._submit, stored, does="submit", takes=NewJobBody,
                  problems=(400, 404, 409, 413, 415, 422),
                  example={"task": "chat", "payload": {"prompt": "Say hello."}}),
            *(_post(f"/api/queues/{{queue}}/{verb}", f"{verb}Jobs",
                    f"{verb.capitalize()} jobs by id", self._act(verb), answered, does=verb,
                    takes=Ids, problems=_WITH_BODY, example={"job_ids": ["1"]})
              for verb in VERBS),
            _post("/api/bulk", "beginBulk",
                  "Retry, cancel or remove all jobs of a search, in bounded batches",
                  self._bulk, {202: Reply("Begun.", Bulk)}, does="VERB all", takes=BulkBody,
                  problems=(400, 409, 413, 415, 422),
                  example={"action": "retry", "q": "is:failed error:Timeout", "expect": 10}),
            _post("/api/bulk/{bulk_id}/stop", "stopBulk",
                  "Stop an action on many jobs; what is done stays done",
                  self._bulk_stop, {200: Reply("The state of the action.", Bulk)},
                  does="stop VERB all", problems=(404,)),
        ]  # fmt: skip

    def _outbox_endpoints(self) -> list[Endpoint]:
        return [
            _get("/api/outboxes", "listOutboxes", "The queues that have an outbox",
                 self._outboxes, OutboxList, is_search=False),
            _get("/api/queues/{queue}/outbox", "readOutbox",
                 "Events of a queue's outbox and their deliveries, newest first",
                 self._deliveries, Deliveries, asks=ReadOutbox, problems=(404, 422)),
            _post("/api/queues/{queue}/outbox/redeliver", "redeliver",
                  "Send events again that were delivered or given up, under the same ids",
                  self._redeliver, {200: Reply("The result for each event.", ActionAnswers)},
                  does="redeliver", takes=RedeliverBody, problems=_WITH_BODY,
                  example={"event_ids": ["0190f5a2-8b3c-7def-8123-456789abcdef.3"]}),
        ]  # fmt: skip

    async def _find(self, call: Call) -> Answer:
        query: FindJobs = call.query
        found = await self._finder.page(parse_now(query.q), after=query.after, limit=query.limit)
        rows = [job_row(each.queue, each.job) for each in found.jobs]
        return Answer(200, JobList(rows, found.after, found.complete))

    async def _count(self, call: Call) -> Answer:
        return Answer(200, await self._finder.count(parse_now(call.query.q), scan_max=COUNT_MAX))

    async def _job(self, call: Call) -> Answer:
        queue = call.path["queue"]
        job = await self._queues[queue].ledger.get(call.path["job_id"])
        if job is None:
            raise NotFound("there is no such job (any more)")
        shown = job if _is_own(call, job) else await self._redaction.seen(job)
        return Answer(200, job_full(queue, shown))

    async def _events(self, call: Call) -> Answer:
        ledger = self._queues[call.path["queue"]].ledger
        query: ReadEvents = call.query
        if query.after and not _EVENT_ID.fullmatch(query.after):
            raise Refused(
                "bad_cursor", "`after` is the id of an event, such as 3 or 1700000000000-0"
            )
        job_id = call.path["job_id"]
        events = await ledger.events(job_id, after=query.after, limit=query.limit)
        job = await ledger.get(job_id)
        if job is None or not _is_own(call, job):
            events = await self._redaction.events(events)
        return Answer(200, EventList([event_row(event) for event in events]))

    async def _workers(self, call: Call) -> Answer:
        self._watch.touch()
        return Answer(200, WorkerList(await workers(self._queues, self._finder, self._watch)))

    async def _schedules(self, call: Call) -> Answer:
        return Answer(200, ScheduleList(await schedules(self._queues)))

    async def _dead(self, call: Call) -> Answer:
        return Answer(200, await dead_letters(self._finder, scan_max=COUNT_MAX))

    async def _stats(self, call: Call) -> Answer:
        self._watch.touch()
        await self._watch.wait_caught_up(within_s=_CATCH_UP_S)
        queues = {name: self._watch.figures(name) for name in self._watch.observers}
        return Answer(200, StatsView(self._watch.figures(), queues))

    async def _backlog(self, call: Call) -> Answer:
        queue = self._queues[call.path["queue"]]
        counts = await queue.ledger.counts()
        per_worker = call.query.per_worker
        found = backlog(queue.name, queue.contract, counts, per_worker=per_worker)
        return Answer(200, found)

    async def _audit(self, call: Call) -> Answer:
        query: ReadAudit = call.query
        entries = await self._actions.audit.list(before=query.before, limit=query.limit)
        return Answer(200, AuditList(entries))

    async def _submit(self, call: Call) -> Answer:
        body: NewJobBody = call.body
        queue = call.path["queue"]
        job = NewJob(
            task=body.task,
            payload=msgspec.json.encode({} if body.payload is msgspec.UNSET else body.payload),
            job_id=body.job_id,
            priority=body.priority,
            delay_ms=body.delay_ms,
            max_attempts=body.max_attempts,
            gid=body.gid,
            requester=call.caller.requester,
        )
        submitted = await self._actions.submit(call.caller.who, queue, job)
        status = 201 if submitted.status == "created" else 200
        return Answer(status, SubmittedJob(queue, submitted.job_id, submitted.status))

    def _act(self, verb: Verb) -> Handle:
        async def handle(call: Call) -> Answer:
            ids: Ids = call.body
            answers = await self._actions.act(
                call.caller.who, verb, call.path["queue"], ids.job_ids
            )
            return Answer(200, ActionAnswers(dict(zip(ids.job_ids, answers, strict=True))))

        return handle

    async def _bulk(self, call: Call) -> Answer:
        body: BulkBody = call.body
        search = parse_now(body.q)
        if body.expect is not None:
            count = await run_while_connected(self._finder.count(search), call.gone)
            if count.jobs > body.expect:
                raise Conflict(f"{count.jobs} jobs match by now, not {body.expect}")
        return Answer(202, await self._actions.begin(call.caller.who, body.action, search))

    async def _bulk_state(self, call: Call) -> Answer:
        return Answer(200, self._actions.bulk(call.path["bulk_id"]))

    async def _bulk_stop(self, call: Call) -> Answer:
        return Answer(200, await self._actions.stop(call.caller.who, call.path["bulk_id"]))

    async def _outboxes(self, call: Call) -> Answer:
        return Answer(200, OutboxList(outboxes(self._queues)))

    async def _deliveries(self, call: Call) -> Answer:
        query: ReadOutbox = call.query
        found = await deliveries(
            self._queues,
            call.path["queue"],
            self._redaction,
            kind=query.kind,
            after=query.after,
            limit=query.limit,
        )
        return Answer(200, found)

    async def _redeliver(self, call: Call) -> Answer:
        body: RedeliverBody = call.body
        event_ids = list(dict.fromkeys(body.event_ids))
        answers = await self._actions.redeliver(call.caller.who, call.path["queue"], event_ids)
        return Answer(200, ActionAnswers(dict(zip(event_ids, answers, strict=True))))


def _is_own(call: Call, job: JobRecord) -> bool:
    """Whether the caller's key submitted the job. A local caller without a key sees masks too."""
    return bool(job.requester) and call.caller.owns(job.requester)


def _get(
    path: str,
    operation: str,
    summary: str,
    handle: Handle,
    shape: Any,
    *,
    scope: Scope = "observe",
    is_search: bool = True,
    **more: Any,
) -> Endpoint:
    return Endpoint(
        method="GET",
        path=path,
        operation=operation,
        summary=summary,
        right=Right(scope, "all"),
        handle=handle,
        replies={200: Reply("The current state.", shape)},
        is_search=is_search,
        tag="observing",
        **more,
    )


def _post(
    path: str,
    operation: str,
    summary: str,
    handle: Handle,
    replies: dict[int, Reply],
    *,
    does: str,
    **more: Any,
) -> Endpoint:
    return Endpoint(
        method="POST",
        path=path,
        operation=operation,
        summary=summary,
        right=Right("admin", "all", does=does, audit="handler"),
        handle=handle,
        replies=replies,
        tag="steering",
        **more,
    )
