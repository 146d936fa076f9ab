"""The data of pages and /api: jobs, workers, dead letters, deliveries, warnings."""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from tenure.core.errors import NotFound, StoreError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.portable import State, meanings, portable_counts, state_of
from tenure.core.redaction import Redaction
from tenure.core.seam import Counts, Ledger, Query
from tenure.dashboard.display import decode_json, duration, error_info, now_ms
from tenure.dashboard.finder import FoundJob, JobFinder, PartlyUnreachable, ScanLimit
from tenure.dashboard.queues import OpenQueue, QueueRegistry, gather_available
from tenure.dashboard.search import Search, Term
from tenure.dashboard.watch import JournalWatch, Observer, SeenWorker

DELIVERY_KINDS = {"": "all", "waiting": "waiting", "done": "delivered", "failed": "given up"}
_NO_NUL = r"^[^\x00]*$"
_DEAD_MAX = 5_000
_RUNNING_MAX = 500
_GONE_MS = 600_000
_OVERDUE_MS = 30_000
_OLD_MS = 60_000
_SPREAD_MAX = 200
_SPREAD_SHOWN = 6


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job in a list. `state` means the same for every contract; `own_state` is its own word."""

    queue: str
    job_id: str
    contract: str
    task: str
    state: State
    own_state: str
    attempt: int
    max_attempts: int
    created_ms: int
    updated_ms: int
    due_ms: int
    worker_id: str
    error_class: str
    error_message: str


class JobFull(msgspec.Struct, frozen=True, kw_only=True):
    """A job with all fields. Secrets are masked for all but its requester."""

    queue: str
    job_id: str
    contract: str
    task: str
    state: State
    own_state: str
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
    """Jobs, newest first. `after` is the cursor of the next page.

    `complete` is false if the search stopped early.
    """

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
    """The id of the stored job."""

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
    """Per job "ok", "requested", or the reason why not."""

    answers: dict[str, str]


class BulkBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An action on all jobs of a search. With `expect`, refused if more jobs match."""

    action: Literal["retry", "cancel", "remove"]
    q: Annotated[str, Meta(min_length=1, max_length=1000, pattern=_NO_NUL)]
    expect: Annotated[int, Meta(ge=0, le=2**53)] | None = None


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker: when it was last seen, and its running jobs. `slots` 0 means unknown."""

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


class ScheduleView(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule: `times` is its cron pattern or its interval; `last_id` is its last job."""

    queue: str
    name: str
    task: str
    times: str
    tz: str
    missed: str
    declared: bool
    next_ms: int
    last_ms: int
    last_id: str
    error: str


class ScheduleList(msgspec.Struct, frozen=True):
    """The schedules of all queues, the next one due first."""

    schedules: list[ScheduleView]


class DeadGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Failed jobs with the same error class."""

    queue: str
    error_class: str
    jobs: int
    tasks: list[str]
    last_ms: int
    message: str


class DeadList(msgspec.Struct, frozen=True):
    """Dead letters by error class; `complete` is false if only the newest were read."""

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


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook event. `answer` is the last answer of the receiver, if it is kept; `to` is its URL
    without user and query, which may be secret."""

    event_id: str
    job_id: str
    step: str
    to: str
    state: State
    own_state: str
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


class QueueWarning(msgspec.Struct, frozen=True):
    """A warning on the overview page; `remedy` says what helps."""

    queue: str
    text: str
    remedy: str
    link: str = ""


class WaitingSpread(msgspec.Struct, frozen=True):
    """Groups and priorities of the newest waiting jobs of a queue; `looked_at` jobs."""

    groups: list[tuple[str, int]]
    priorities: list[tuple[int, int]]
    looked_at: int


def job_row(queue: str, job: JobRecord) -> JobRow:
    """A job for a list."""
    error = error_info(job.error)
    own = {
        "queue": queue,
        "state": state_of(job),
        "own_state": job.state,
        "error_class": error.name,
        "error_message": error.message[:300],
    }
    return JobRow(**_fields(JobRow, job) | own)


def job_full(queue: str, job: JobRecord) -> JobFull:
    """A job with all fields."""
    own: dict[str, Any] = {"queue": queue, "extra": dict(job.extra)}
    own |= {"state": state_of(job), "own_state": job.state}
    for name in ("payload", "result", "error", "progress"):
        own[name] = decode_json(getattr(job, name))
    return JobFull(**_fields(JobFull, job) | own)


def event_row(event: JobEvent) -> EventLine:
    """An event for a list."""
    return EventLine(event.event_id, event.type, event.ts_ms, event.step, decode_json(event.data))


def _fields(shape: type[msgspec.Struct], job: JobRecord) -> dict[str, Any]:
    """The fields that a shape shares with the record."""
    names = shape.__struct_fields__
    return {name: getattr(job, name) for name in names if hasattr(job, name)}


def outboxes(queues: QueueRegistry) -> list[str]:
    """The queues that have an outbox."""
    return [queue.name for queue in queues if queue.outbox is not None]


def outbox_of(queues: QueueRegistry, queue: str) -> Ledger:
    """The outbox of a queue."""
    ledger = queues[queue].outbox
    if ledger is None:
        raise NotFound(
            f"{queue} has no outbox; these have: {', '.join(outboxes(queues)) or 'none'}"
        )
    return ledger


async def deliveries(
    queues: QueueRegistry,
    queue: str,
    redaction: Redaction,
    *,
    kind: str = "",
    after: str = "",
    limit: int = 50,
) -> Deliveries:
    """The events of a queue's outbox, of one kind or all."""
    ledger = outbox_of(queues, queue)
    counts = await ledger.counts()
    contract = queues[queue].contract
    states = tuple(word for word in counts.states if kind in meanings(contract, word))
    page = await ledger.find(Query(states=states, after=after, limit=limit))
    return Deliveries(
        queue, [_delivery(await redaction.seen(event)) for event in page.jobs], page.after
    )


def _delivery(event: JobRecord) -> Delivery:
    payload, result = decode_json(event.payload), decode_json(event.result)
    if isinstance(result, dict) and "status" in result:
        answer = f"{result['status']}, {result['ms']} ms" if "ms" in result else result["status"]
    else:
        answer = error_info(event.error).message[:200]
    own = {
        "event_id": event.job_id,
        "job_id": event.gid,
        "step": str(payload.get("status", "")) if isinstance(payload, dict) else "",
        "to": _address(str(event.extra.get("status_webhook_url", ""))),
        "state": state_of(event),
        "own_state": event.state,
        "answer": str(answer),
    }
    return Delivery(**_fields(Delivery, event) | own)


def _address(url: str) -> str:
    """The URL without user and query, which may be secret.

    >>> _address("https://me:pw@hooks.example:8443/a/b?token=1")
    'https://hooks.example:8443/a/b'
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}" if host else ""


async def schedules(queues: QueueRegistry) -> list[ScheduleView]:
    """The schedules of all queues, the next one due first."""
    by_queue = await gather_available(_schedules(queue) for queue in queues)
    found = [schedule for schedules in by_queue for schedule in schedules or ()]
    return sorted(found, key=lambda each: (each.next_ms or 2**63, each.name))


async def _schedules(queue: OpenQueue) -> list[ScheduleView]:
    stored = queue.ledger.features.schedules
    return [
        ScheduleView(
            queue=queue.name,
            name=each.name,
            task=each.template.task,
            times=each.cron or f"every {each.every_ms / 1000:g} s",
            tz=each.tz if each.cron else "",
            missed=each.missed,
            declared=each.declared,
            next_ms=each.next_ms,
            last_ms=each.last_ms,
            last_id=each.last_id,
            error=each.error,
        )
        for each in (await stored.list() if stored is not None else ())
    ]


async def workers(
    queues: QueueRegistry, finder: JobFinder, watch: JournalWatch
) -> list[WorkerView]:
    """The workers that hold a job, send heartbeats, or were seen within ten minutes."""
    by_queue = await gather_available(_workers(queue, finder, watch) for queue in queues)
    found = [worker for workers in by_queue for worker in workers or ()]
    return sorted(found, key=lambda w: (-len(w.jobs), -w.last_ms, w.worker_id))


async def _workers(queue: OpenQueue, finder: JobFinder, watch: JournalWatch) -> list[WorkerView]:
    running: dict[str, list[JobRow]] = {}
    for found in await _newest(finder, _RUNNING_MAX, queue=queue.name, state="running"):
        running.setdefault(found.job.worker_id, []).append(job_row(found.queue, found.job))
    beats = {beat.worker_id: beat for beat in await queue.ledger.workers()}
    recent_ms = now_ms() - _GONE_MS
    observed = watch.observers[queue.name].workers
    seen = {name: worker for name, worker in observed.items() if worker.last_ms > recent_ms}
    views = []
    for name in dict.fromkeys([*running, *beats, *seen]):
        beat, in_journal = beats.get(name), seen.get(name, SeenWorker(name))
        views.append(
            WorkerView(
                queue=queue.name,
                worker_id=name or "(unnamed)",
                last_ms=max(beat.last_ms if beat else 0, in_journal.last_ms),
                slots=beat.slots if beat else 0,
                started=in_journal.started,
                finished=in_journal.finished,
                failed=in_journal.failed,
                jobs=running.get(name, []),
            )
        )
    return views


async def _newest(finder: JobFinder, limit: int, *, state: str, queue: str = "") -> list[FoundJob]:
    terms = [Term("is", ":", state)] + ([Term("queue", ":", queue)] if queue else [])
    return (await finder.page(Search("", tuple(terms)), limit=limit)).jobs


async def dead_letters(finder: JobFinder, *, scan_max: int = 0) -> DeadList:
    """Failed jobs of all queues by queue and error class, the largest group first."""
    groups: dict[tuple[str, str], list[tuple[int, str, str]]] = {}
    seen, complete = 0, True
    search = Search("is:failed", (Term("is", ":", "failed"),))
    try:
        async for jobs in finder.each(search, step=500, scan_max=scan_max):
            for found in jobs:
                error = error_info(found.job.error)
                key = (found.queue, error.name or "unknown")
                row = (found.job.updated_ms, found.job.task, error.message[:300])
                groups.setdefault(key, []).append(row)
            seen += len(jobs)
            if seen >= _DEAD_MAX:
                complete = False
                break
    except (PartlyUnreachable, ScanLimit):
        complete = False
    listed = []
    for (queue, name), rows in groups.items():
        last_ms, _, message = max(rows, key=lambda row: row[0])
        listed.append(
            DeadGroup(
                queue=queue,
                error_class=name,
                jobs=len(rows),
                tasks=sorted({task for _, task, _ in rows})[:8],
                last_ms=last_ms,
                message=message,
            )
        )
    return DeadList(sorted(listed, key=lambda group: -group.jobs), complete)


async def waiting_spread(queue: str, finder: JobFinder) -> WaitingSpread:
    """Groups and priorities of the newest waiting jobs."""
    try:
        found = await _newest(finder, _SPREAD_MAX, queue=queue, state="waiting")
    except StoreError:
        return WaitingSpread([], [], 0)
    groups = Counter(each.job.gid for each in found if each.job.gid)
    priorities = Counter(each.job.priority for each in found)
    spread = sorted(priorities.items()) if set(priorities) - {0} else []
    return WaitingSpread(groups.most_common(_SPREAD_SHOWN), spread[:_SPREAD_SHOWN], len(found))


def backlog(queue: str, contract: str, counts: Counts, *, per_worker: int) -> Backlog:
    """The data for a scaler. `desired` is the number of workers with `per_worker` jobs each."""
    states = portable_counts(contract, counts.states)
    waiting, running = states["waiting"], states["running"]
    desired = 0 if counts.paused else math.ceil((waiting + running) / max(1, per_worker))
    return Backlog(queue, waiting, running, counts.workers, desired, counts.oldest_waiting_ms)


def warnings(watch: JournalWatch, *, now_ms: int) -> list[QueueWarning]:
    """Warnings about the queues, from counts and journals."""
    found: list[QueueWarning] = []
    for name, observer in watch.observers.items():
        if observer.away:
            found.append(QueueWarning(name, "the store does not answer", "tenure doctor"))
            continue
        if observer.counts is not None:
            found += _queue_warnings(observer, observer.counts, now_ms)
        if observer.missing:
            text = f"a gap in its journal: {observer.missing} steps of the last quarter of an hour "
            remedy = "keep more of it (journal_bytes, journal_days), and the append-only file on: "
            found.append(QueueWarning(name, text + "are not in it", remedy + "tenure doctor"))
        if observer.sampled:
            text = "the journal is faster than this page: figures are sampled"
            found.append(QueueWarning(name, text, "scrape /metrics for exact figures"))
    return found


def _queue_warnings(observer: Observer, counts: Counts, now_ms: int) -> list[QueueWarning]:
    name = observer.queue.name
    waiting = portable_counts(observer.queue.contract, counts.states)["waiting"]
    link = f"/jobs?q=queue:{name}+is:waiting"
    if counts.paused:
        return [QueueWarning(name, f"paused, {waiting} jobs wait", "resume it", "/queues")]
    if waiting and not counts.workers and now_ms - observer.last_claim_ms > _OVERDUE_MS:
        text = f"no worker, and {waiting} jobs wait"
        return [QueueWarning(name, text, "tenure worker TASKS --queue URL", link)]
    if counts.oldest_waiting_ms > _OLD_MS:
        text = f"the oldest job has waited {duration(counts.oldest_waiting_ms)}"
        return [QueueWarning(name, text, "add workers or slots", link)]
    return []


async def overdue(finder: JobFinder, *, now_ms: int) -> list[QueueWarning]:
    """Queues with long expired leases: no worker does their upkeep."""
    late = Counter(
        found.queue
        for found in await _newest(finder, _RUNNING_MAX, state="running")
        if 0 < found.job.lease_until_ms < now_ms - _OVERDUE_MS
    )
    return [
        QueueWarning(
            queue,
            f"{count} leases ran out and nobody took the jobs back",
            "start a worker: workers do the upkeep",
            f"/jobs?q=queue:{queue}+is:running",
        )
        for queue, count in late.items()
    ]
