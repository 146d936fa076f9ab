"""Jobs, events and counts as a caller sees them: decoded, with the portable state.

They are dataclasses, so that a route of FastAPI can return them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tenure.core.encoding import shown_json
from tenure.core.job import JobEvent, JobRecord, Missed, Schedule
from tenure.core.portable import State, end_of, portable_counts, state_of
from tenure.core.seam import Counts


@dataclass(frozen=True, slots=True)
class JobError:
    """Why a job failed: the class or code of the error, its text, and the worker's traceback.

    Where a contract keeps no traceback, it is "".
    """

    code: str = ""
    message: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A job as it is stored. `state` is portable, `own_state` the word of the contract.

    Times are milliseconds since 1970 on the store's clock, 0 where there is none. `payload`,
    `result` and `progress` are plain JSON values; `Handle.result` gives the typed result.
    """

    id: str
    task: str
    state: State
    own_state: str
    contract: str
    queue: str
    payload: Any = None
    result: Any = None
    error: JobError | None = None
    progress: Any = None
    attempt: int = 0
    max_attempts: int = 0
    priority: int = 0
    group: str = ""
    worker_id: str = ""
    created_ms: int = 0
    updated_ms: int = 0
    due_ms: int = 0

    @property
    def ended(self) -> bool:
        """Whether it is done, failed or cancelled."""
        return self.state in ("done", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class JobPage:
    """Some jobs, newest first; `after` continues the search, "" at its end."""

    jobs: list[JobInfo]
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a job. `id` resumes a reader after it.

    `type` is the contract's word, or what a handler reported. `state` is set by the event that ends
    the job.
    """

    id: str
    type: str
    ts_ms: int
    step: str = ""
    data: Any = None
    state: State | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCounts:
    """How many jobs are in which state now; `own` has the contract's own words.

    Where a contract has one word for waiting and scheduled jobs, both count as waiting; where it
    has one for failed and cancelled jobs, both count as failed.
    """

    waiting: int
    scheduled: int
    running: int
    done: int
    failed: int
    cancelled: int
    paused: bool
    workers: int
    oldest_waiting_ms: int
    own: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInfo:
    """A schedule. It has either `cron` or `every_s`.

    `declared` says that a task declares it. `next_ms` is its next time (0: none), `last_id` the job
    of the last one, where the contract keeps it. `error` is why the queue refused that job.
    """

    name: str
    task: str
    payload: Any = None
    cron: str = ""
    every_s: float | None = None
    tz: str = ""
    missed: Missed = "one"
    declared: bool = False
    next_ms: int = 0
    last_ms: int = 0
    last_id: str = ""
    error: str = ""


def schedule_info(schedule: Schedule) -> ScheduleInfo:
    """A stored schedule, decoded."""
    return ScheduleInfo(
        name=schedule.name,
        task=schedule.template.task,
        payload=_value(schedule.template.payload.encode()),
        cron=schedule.cron,
        every_s=schedule.every_ms / 1000 if schedule.every_ms else None,
        tz=schedule.tz if schedule.cron else "",
        missed=schedule.missed,
        declared=schedule.declared,
        next_ms=schedule.next_ms,
        last_ms=schedule.last_ms,
        last_id=schedule.last_id,
        error=schedule.error,
    )


def job_info(record: JobRecord) -> JobInfo:
    """A stored job, decoded."""
    return JobInfo(
        id=record.job_id,
        task=record.task,
        state=state_of(record),
        own_state=record.state,
        contract=record.contract,
        queue=record.queue,
        payload=_value(record.payload),
        result=_value(record.result),
        error=job_error(record.error) if record.error else None,
        progress=_value(record.progress),
        attempt=record.attempt,
        max_attempts=record.max_attempts,
        priority=record.priority,
        group=record.gid,
        worker_id=record.worker_id,
        created_ms=record.created_ms,
        updated_ms=record.updated_ms,
        due_ms=max(0, record.due_ms),
    )


def job_error(raw: bytes) -> JobError:
    """The stored error; one that another program wrote may be any JSON, or plain text."""
    value = _value(raw)
    if not isinstance(value, dict):
        return JobError(message="" if value is None else str(value))
    if "_raw" in value:
        return JobError(message=str(value["_raw"]))
    return JobError(
        code=str(value.get("code") or ""),
        message=str(value.get("message") or ""),
        traceback=str(value.get("stack") or ""),
    )


def job_event(contract: str, event: JobEvent) -> Event:
    """An event, decoded."""
    return Event(
        id=event.event_id,
        type=event.type,
        ts_ms=event.ts_ms,
        step=event.step,
        data=_value(event.data),
        state=end_of(contract, event.type),
    )


def queue_counts(contract: str, counts: Counts) -> QueueCounts:
    """The depths of a queue by portable state."""
    states = portable_counts(contract, counts.states)
    return QueueCounts(
        **states,
        paused=counts.paused,
        workers=counts.workers,
        oldest_waiting_ms=counts.oldest_waiting_ms,
        own=dict(counts.states),
    )


def _value(raw: bytes) -> Any:
    return shown_json(raw) if raw else None
