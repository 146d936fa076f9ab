"""What pages and /api show: jobs, workers, dead letters, deliveries, warnings."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from tenure.core.errors import NotFound, StoreError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.redacting import Redaction
from tenure.core.seam import Counts, Ledger, Query, Staffed
from tenure.dashboard.display import decode_json, duration, error_info
from tenure.dashboard.queues import QueueRegistry, ServedQueue, gather_available, kind_of
from tenure.dashboard.search import Finder, PartlyAway, ScanLimit, Search, Term
from tenure.dashboard.watch import Watch

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


def job_row(queue: str, job: JobRecord) -> JobRow:
    """The line of a job."""
    fault = error_info(job.error)
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
        payload=decode_json(job.payload),
        result=decode_json(job.result),
        error=decode_json(job.error),
        progress=decode_json(job.progress),
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


def event_row(event: JobEvent) -> EventLine:
    """The line of an event."""
    return EventLine(event.event_id, event.type, event.ts_ms, event.step, decode_json(event.data))


CHOICES = (("", "all"), ("waiting", "waiting"), ("done", "delivered"), ("failed", "given up"))
_PAGE = 50


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """An event on its way. `answer` is what the receiver said last, as far as it is kept; `to` is
    without what may be a secret: neither user nor query."""

    event_id: str
    job_id: str
    step: str
    to: str
    state: str
    kind: str
    attempt: int
    max_attempts: int
    created_ms: int
    updated_ms: int
    due_ms: int
    answer: str


class Deliveries(msgspec.Struct, frozen=True):
    """A page of one outbox, newest first."""

    queue: str
    events: list[Delivery]
    after: str


def outboxes(street: QueueRegistry) -> list[str]:
    """The queues that have one."""
    return [house.name for house in street if house.outbox is not None]


def outbox_of(street: QueueRegistry, queue: str) -> Ledger:
    """The outbox of a queue."""
    ledger = street[queue].outbox
    if ledger is None:
        raise NotFound(
            f"{queue} has no outbox; these have: {', '.join(outboxes(street)) or 'none'}"
        )
    return ledger


async def deliveries(
    street: QueueRegistry,
    queue: str,
    redaction: Redaction,
    *,
    kind: str = "",
    after: str = "",
    limit: int = _PAGE,
) -> Deliveries:
    """Events of a queue's outbox, of one kind if asked for."""
    ledger = outbox_of(street, queue)
    counts = await ledger.counts()
    states = tuple(state for state in counts.states if kind_of(state) == kind)
    page = await ledger.find(Query(states=states, after=after, limit=limit))
    return Deliveries(
        queue, [_delivery(await redaction.seen(event)) for event in page.jobs], page.after
    )


def _delivery(event: JobRecord) -> Delivery:
    told = decode_json(event.payload)
    return Delivery(
        event_id=event.job_id,
        job_id=event.gid,
        step=str(told.get("status", "")) if isinstance(told, dict) else "",
        to=_address(str(event.extra.get("status_webhook_url", ""))),
        state=event.state,
        kind=kind_of(event.state),
        attempt=event.attempt,
        max_attempts=event.max_attempts,
        created_ms=event.created_ms,
        updated_ms=event.updated_ms,
        due_ms=event.due_ms,
        answer=_answer(event),
    )


def _answer(event: JobRecord) -> str:
    result: Any = decode_json(event.result) if event.result else None
    if isinstance(result, dict) and "status" in result:
        took = f", {result['ms']} ms" if "ms" in result else ""
        return f"{result['status']}{took}"
    return error_info(event.error).message[:200]


def _address(url: str) -> str:
    """Without what may be a secret: neither user nor query.

    >>> _address("https://me:pw@hooks.example:8443/a/b?token=1")
    'https://hooks.example:8443/a/b'
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}" if host else ""


_RUNNING_MAX = 500
DEAD_MAX = 5_000
_GONE_MS = 600_000
_OVERDUE_MS = 30_000
_OLD_MS = 60_000
_SPREAD_MAX = 200
_SPREAD_SHOWN = 6


class Warn(msgspec.Struct, frozen=True):
    """Something a person should know. `remedy` says what helps."""

    queue: str
    text: str
    remedy: str
    link: str = ""


async def workers(street: QueueRegistry, finder: Finder, watch: Watch) -> list[WorkerView]:
    """Everyone who holds a job, beats, or was heard of within ten minutes."""
    by_house = await gather_available(_workers(house, finder, watch) for house in street)
    found = [worker for workers in by_house for worker in workers or ()]
    return sorted(found, key=lambda w: (-len(w.jobs), -w.last_ms, w.worker_id))


async def _workers(house: ServedQueue, finder: Finder, watch: Watch) -> list[WorkerView]:
    running: dict[str, list[JobRow]] = {}
    search = Search("", (Term("queue", ":", house.name), Term("is", ":", "running")))
    for found in (await finder.page(search, limit=_RUNNING_MAX)).jobs:
        running.setdefault(found.job.worker_id, []).append(job_row(found.queue, found.job))
    beats = {}
    if isinstance(house.ledger, Staffed):
        beats = {beat.worker_id: beat for beat in await house.ledger.workers()}
    recent_ms = time.time_ns() // 1_000_000 - _GONE_MS
    seen = {
        w.worker_id: w
        for w in watch.observers[house.name].workers.values()
        if w.last_ms > recent_ms
    }
    names = dict.fromkeys([*running, *beats, *seen])
    views = []
    for name in names:
        beat, heard = beats.get(name), seen.get(name)
        views.append(
            WorkerView(
                queue=house.name,
                worker_id=name or "(unnamed)",
                last_ms=max(beat.last_ms if beat else 0, heard.last_ms if heard else 0),
                slots=beat.slots if beat else 0,
                started=heard.started if heard else 0,
                finished=heard.finished if heard else 0,
                failed=heard.failed if heard else 0,
                jobs=running.get(name, []),
            )
        )
    return views


async def dead_letters(finder: Finder, *, most: int = DEAD_MAX, scan_max: int = 0) -> DeadList:
    """Failed jobs of all queues by queue and error class, the most first."""
    tallies: dict[tuple[str, str], _Group] = {}
    seen, complete = 0, True
    search = Search("is:failed", (Term("is", ":", "failed"),))
    try:
        async for jobs in finder.each(search, step=500, scan_max=scan_max):
            for found in jobs:
                fault = error_info(found.job.error)
                key = (found.queue, fault.name or "unknown")
                tallies.setdefault(key, _Group()).add(
                    found.job.task, found.job.updated_ms, fault.message
                )
            seen += len(jobs)
            if seen >= most:
                complete = False
                break
    except (PartlyAway, ScanLimit):
        complete = False
    made = [
        DeadGroup(
            queue=queue,
            error_class=name,
            jobs=group.jobs,
            tasks=sorted(group.tasks)[:8],
            last_ms=group.last_ms,
            message=group.message[:300],
        )
        for (queue, name), group in tallies.items()
    ]
    return DeadList(sorted(made, key=lambda group: -group.jobs), complete)


class WaitingSpread(msgspec.Struct, frozen=True):
    """How the waiting jobs of a queue are spread; `looked_at` of them, the newest."""

    groups: list[tuple[str, int]]
    priorities: list[tuple[int, int]]
    looked_at: int


async def waiting_spread(queue: str, finder: Finder) -> WaitingSpread:
    """Groups and priorities of what waits, where its jobs have any."""
    search = Search("", (Term("queue", ":", queue), Term("is", ":", "waiting")))
    try:
        jobs = [found.job for found in (await finder.page(search, limit=_SPREAD_MAX)).jobs]
    except StoreError:
        return WaitingSpread([], [], 0)
    groups = Counter(job.gid for job in jobs if job.gid)
    priorities = Counter(job.priority for job in jobs)
    spread = sorted(priorities.items()) if set(priorities) - {0} else []
    return WaitingSpread(groups.most_common(_SPREAD_SHOWN), spread[:_SPREAD_SHOWN], len(jobs))


class _Group:
    """Gathers one group of dead letters; its words are those of the newest."""

    def __init__(self) -> None:
        self.jobs = 0
        self.tasks: set[str] = set()
        self.last_ms = 0
        self.message = ""

    def add(self, task: str, updated_ms: int, message: str) -> None:
        self.jobs += 1
        self.tasks.add(task)
        if updated_ms >= self.last_ms:
            self.last_ms, self.message = updated_ms, message


def by_kind(counts: Counts) -> dict[str, int]:
    """Depths by kind."""
    summed: dict[str, int] = {}
    for state, depth in counts.states.items():
        kind = kind_of(state)
        summed[kind] = summed.get(kind, 0) + depth
    return summed


def backlog(queue: str, counts: Counts, *, per_worker: int) -> Backlog:
    """What a scaler needs. `desired` workers, if one is to have `per_worker` jobs."""
    kinds = by_kind(counts)
    waiting, running = kinds.get("waiting", 0), kinds.get("running", 0)
    desired = 0 if counts.paused else math.ceil((waiting + running) / max(1, per_worker))
    return Backlog(queue, waiting, running, counts.workers, desired, counts.oldest_waiting_ms)


def warnings(watch: Watch, *, now_ms: int) -> list[Warn]:
    """What is wrong with queues, as far as counts and journals tell."""
    found: list[Warn] = []
    for name, observer in watch.observers.items():
        if observer.away:
            found.append(Warn(name, "the store does not answer", "tenure doctor"))
            continue
        counts = observer.counts
        if counts is not None:
            found += _queue_warnings(name, counts, observer.last_claim_ms, now_ms)
        if observer.missing:
            found.append(
                Warn(name, f"a gap in its journal: {observer.missing} steps of the last quarter of "
                     "an hour are not in it", "keep more of it (journal_bytes, journal_days), and "
                     "the append-only file on: tenure doctor")
            )  # fmt: skip
        if observer.sampled:
            found.append(
                Warn(name, "the journal is faster than this page: figures are sampled",
                     "scrape /metrics for exact figures")
            )  # fmt: skip
    return found


def _queue_warnings(name: str, counts: Counts, last_claim_ms: int, now_ms: int) -> list[Warn]:
    found: list[Warn] = []
    kinds = by_kind(counts)
    waiting = kinds.get("waiting", 0)
    link = f"/jobs?q=queue:{name}+is:waiting"
    if counts.paused:
        found.append(Warn(name, f"paused, {waiting} jobs wait", "resume it", "/queues"))
    elif waiting and not counts.workers and now_ms - last_claim_ms > _OVERDUE_MS:
        found.append(
            Warn(
                name,
                f"no worker, and {waiting} jobs wait",
                "tenure worker TASKS --from URL",
                link,
            )
        )
    elif counts.oldest_waiting_ms > _OLD_MS:
        waited = duration(counts.oldest_waiting_ms)
        found.append(
            Warn(name, f"the oldest job has waited {waited}", "add workers or slots", link)
        )
    return found


async def overdue(finder: Finder, *, now_ms: int) -> list[Warn]:
    """Queues with jobs whose lease ran out long ago: nobody does their upkeep."""
    late: dict[str, int] = {}
    search = Search("", (Term("is", ":", "running"),))
    for found in (await finder.page(search, limit=_RUNNING_MAX)).jobs:
        if 0 < found.job.lease_until_ms < now_ms - _OVERDUE_MS:
            late[found.queue] = late.get(found.queue, 0) + 1
    return [
        Warn(
            queue,
            f"{count} leases ran out and nobody took the jobs back",
            "start a worker: workers do the upkeep",
            f"/jobs?q=queue:{queue}+is:running",
        )
        for queue, count in late.items()
    ]
