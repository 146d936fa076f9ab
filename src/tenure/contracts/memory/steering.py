"""What an operator may do to jobs: send back, cancel, remove (M-19, M-20). "ok" or why not."""

from __future__ import annotations

from collections.abc import Iterable

from tenure.contracts.memory.contents import Contents
from tenure.contracts.memory.stored import StoredJob
from tenure.core.job import JobRecord
from tenure.core.seam import Counts, Page, Query, WorkerBeat
from tenure.core.state import MEMORY

WORKER_SILENT_LEASES = 2
_UNKNOWN = "there is no such job"


def reopen(contents: Contents, job_id: str) -> str:
    """Send a finished job back to the line with all its attempts; the fence goes on rising."""
    job = contents.jobs.get(job_id)
    if job is None:
        return _UNKNOWN
    if job.state not in MEMORY.final:
        return f"the job is {job.state}; only a finished job can be sent back"
    fresh = {"attempt": 0, "result": b"", "error": b"", "progress": b"", "worker_id": ""}
    contents.history.step(job, "reopen", "waiting", reopening=True, **fresh)
    contents.depth += 1
    contents.line.append(job)
    return "ok"


def cancel(contents: Contents, job_id: str) -> str:
    """End a waiting job now; ask the holder of a running one, who hears of it at its extend."""
    job = contents.jobs.get(job_id)
    if job is None:
        return _UNKNOWN
    if job.state == "running":
        job.cancel_requested = True
        return "requested"
    if job.state != "waiting":
        return f"the job is {job.state} already"
    contents.finish(job, "cancel", "cancelled")
    return "ok"


def remove(contents: Contents, job_id: str) -> str:
    """Delete a job that nobody runs."""
    job = contents.jobs.get(job_id)
    if job is None:
        return _UNKNOWN
    if job.state == "running":
        return "the job is running; cancel it first"
    contents.remove(job, "by an operator")
    return "ok"


def pause(contents: Contents, *, paused: bool) -> None:
    """Stop or begin again to hand out leases."""
    if contents.paused != paused:
        contents.paused = paused
        contents.history.paused(contents.name, paused=paused)


def find(contents: Contents, query: Query) -> Page:
    """Jobs newest first; a page ends at `limit` and goes on after its last job."""
    matching = (job for job in _newest(contents, query.after) if _matches(job, query))
    records: list[JobRecord] = []
    for job in matching:
        if len(records) == query.limit:
            return Page(records, records[-1].job_id)
        records.append(job.record())
    return Page(records)


def count(contents: Contents) -> Counts:
    """Depths by state, how often each step happened, and who asked for work lately."""
    states = dict.fromkeys(MEMORY.states, 0)
    oldest_ms = now_ms = contents.now_ms()
    for job in contents.jobs.values():
        states[job.state] += 1
        if job.state == "waiting":
            oldest_ms = min(oldest_ms, job.created_ms)
    return Counts(
        states=states,
        totals=dict(contents.history.totals),
        paused=contents.paused,
        workers=len(workers(contents)),
        oldest_waiting_ms=now_ms - oldest_ms,
    )


def workers(contents: Contents) -> list[WorkerBeat]:
    """Who asked for work lately."""
    silent_ms = contents.now_ms() - WORKER_SILENT_LEASES * contents.options.lease_ms
    return [
        WorkerBeat(worker_id, seen_ms, contents.slots.get(worker_id, 0))
        for worker_id, seen_ms in contents.workers.items()
        if seen_ms >= silent_ms
    ]


def _newest(contents: Contents, after: str) -> Iterable[StoredJob]:
    newest = reversed(contents.jobs.values())
    if after not in contents.jobs:
        return newest if not after else ()
    for job in newest:
        if job.job_id == after:
            break
    return newest


def _matches(job: StoredJob, query: Query) -> bool:
    in_state = not query.states or job.state in query.states
    return in_state and (not query.task or job.task == query.task)
