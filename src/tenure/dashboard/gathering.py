"""Answers that need more than one call of a ledger: workers, dead letters, backlog, warnings."""

from __future__ import annotations

import math
import time
from collections import Counter

import msgspec

from tenure.core.errors import StoreError
from tenure.core.seam import Counts, Staffed
from tenure.dashboard.finding import Finder, NotAll, PartlyAway
from tenure.dashboard.house import House, Street, that_answer
from tenure.dashboard.kinds import kind_of
from tenure.dashboard.reading import fault_of
from tenure.dashboard.search import Search, Term
from tenure.dashboard.shapes import Backlog, DeadGroup, DeadList, JobRow, WorkerView, job_line
from tenure.dashboard.watching import Watch
from tenure.dashboard.wording import duration

_RUNNING_MAX = 500
DEAD_MAX = 5_000
_GONE_MS = 600_000
_OVERDUE_MS = 30_000
_OLD_MS = 60_000
_LINES_MAX = 200
_LINES_SHOWN = 6


class Warn(msgspec.Struct, frozen=True):
    """Something a person should know. `remedy` says what helps."""

    queue: str
    text: str
    remedy: str
    link: str = ""


async def workers(street: Street, finder: Finder, watch: Watch) -> list[WorkerView]:
    """Everyone who holds a job, beats, or was heard of within ten minutes."""
    by_house = await that_answer(_workers(house, finder, watch) for house in street)
    found = [worker for workers in by_house for worker in workers or ()]
    return sorted(found, key=lambda w: (-len(w.jobs), -w.last_ms, w.worker_id))


async def _workers(house: House, finder: Finder, watch: Watch) -> list[WorkerView]:
    running: dict[str, list[JobRow]] = {}
    search = Search("", (Term("queue", ":", house.name), Term("is", ":", "running")))
    for found in (await finder.page(search, limit=_RUNNING_MAX)).jobs:
        running.setdefault(found.job.worker_id, []).append(job_line(found.queue, found.job))
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
                fault = fault_of(found.job.error)
                key = (found.queue, fault.name or "unknown")
                tallies.setdefault(key, _Group()).add(
                    found.job.task, found.job.updated_ms, fault.message
                )
            seen += len(jobs)
            if seen >= most:
                complete = False
                break
    except (PartlyAway, NotAll):
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


class Lines(msgspec.Struct, frozen=True):
    """How the waiting jobs of a queue are spread; `looked_at` of them, the newest."""

    groups: list[tuple[str, int]]
    priorities: list[tuple[int, int]]
    looked_at: int


async def lines_of(queue: str, finder: Finder) -> Lines:
    """Groups and priorities of what waits, where its jobs have any."""
    search = Search("", (Term("queue", ":", queue), Term("is", ":", "waiting")))
    try:
        jobs = [found.job for found in (await finder.page(search, limit=_LINES_MAX)).jobs]
    except StoreError:
        return Lines([], [], 0)
    groups = Counter(job.gid for job in jobs if job.gid)
    priorities = Counter(job.priority for job in jobs)
    spread = sorted(priorities.items()) if set(priorities) - {0} else []
    return Lines(groups.most_common(_LINES_SHOWN), spread[:_LINES_SHOWN], len(jobs))


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
