"""Actions on jobs and queues, each with an entry in the audit log.

A bulk action, on all jobs of a search, runs in the background in bounded batches. It shows its
progress and can be stopped. The audit log has an entry for its begin and one for its end.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec
import structlog

from tenure.core.endpoint import check_stored
from tenure.core.errors import Conflict, NotFound, TenureError, UsageError
from tenure.core.job import NewJob, Submitted
from tenure.core.seam import Ledger
from tenure.dashboard.audit import IDS_MAX, AuditLog
from tenure.dashboard.display import now_ms
from tenure.dashboard.finder import COUNT_MAX, FoundJob, JobFinder
from tenure.dashboard.queues import QueueRegistry
from tenure.dashboard.search import Search
from tenure.dashboard.views import outbox_of

_log = structlog.get_logger("tenure.dashboard")

Verb = Literal["retry", "cancel", "remove"]
VERBS: tuple[Verb, ...] = ("retry", "cancel", "remove")
_GOOD = ("ok", "requested")
_BATCH = 200
_PAUSE_S = 0.01
_KEPT = 50
_RUNNING_MAX = 4


class Bulk(msgspec.Struct, kw_only=True):
    """An action on many jobs. `total` was counted at its begin; `answers` counts the results."""

    id: str
    verb: Verb
    search: str
    who: str
    total: int
    exact: bool = True
    seen: int = 0
    done: int = 0
    answers: dict[str, int] = {}
    state: Literal["running", "finished", "stopped", "failed"] = "running"
    error: str = ""
    begun_ms: int = 0
    ended_ms: int = 0

    @property
    def share(self) -> float:
        """How far it is, from 0 to 1."""
        if self.state == "finished":
            return 1.0
        return min(1.0, self.seen / self.total) if self.total else 0.0


class Actions:
    """Acts on jobs and queues and writes the audit log. One per dashboard."""

    def __init__(self, queues: QueueRegistry, finder: JobFinder, audit: AuditLog) -> None:
        self._queues = queues
        self._finder = finder
        self.audit = audit
        self._bulks: dict[str, Bulk] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def act(self, who: str, verb: Verb, queue: str, job_ids: Sequence[str]) -> list[str]:
        """Retry, cancel or remove jobs; per id "ok", "requested", or why not."""
        whose = await _owners(self._queues[queue].ledger, job_ids)
        async with self.audit.recorded(who, verb, queue=queue, whose=whose, ids=job_ids) as entry:
            answers = await self._do(verb, queue, job_ids)
            entry["outcome"] = _summary(Counter(answers))
        return answers

    async def steer(self, who: str, verb: Literal["pause", "resume"], queue: str) -> None:
        """Pause or resume a queue."""
        ledger = self._queues[queue].ledger
        async with self.audit.recorded(who, verb, queue=queue, outcome="ok"):
            await (ledger.pause() if verb == "pause" else ledger.resume())

    async def redeliver(self, who: str, queue: str, event_ids: Sequence[str]) -> list[str]:
        """Send events of a queue's outbox again, under their ids."""
        outbox = outbox_of(self._queues, queue)
        what = {"queue": queue, "ids": event_ids, "whose": await _owners(outbox, event_ids)}
        async with self.audit.recorded(who, "redeliver", **what) as entry:
            answers = await outbox.retry(event_ids)
            entry["outcome"] = _summary(Counter(answers))
        return answers

    async def submit(self, who: str, queue: str, job: NewJob, *, why: str = "submit") -> Submitted:
        """Store a new job; raises the reason if the queue refuses it."""
        async with self.audit.recorded(who, why, queue=queue, whose=[job.requester]) as entry:
            (submitted,) = await self._queues[queue].queue.submit([job])
            entry["outcome"] = submitted.reason or submitted.status
            entry["ids"] = [submitted.job_id] if submitted.accepted else []
        check_stored(submitted)
        return submitted

    async def begin(self, who: str, verb: Verb, search: Search) -> Bulk:
        """Start an action on all jobs of a search."""
        if sum(bulk.state == "running" for bulk in self._bulks.values()) >= _RUNNING_MAX:
            raise Conflict(f"{_RUNNING_MAX} actions on many jobs run already; stop one, or wait")
        await self.audit.check()
        count = await self._finder.count(search, scan_max=COUNT_MAX)
        bulk = Bulk(
            id=secrets.token_hex(6),
            verb=verb,
            search=self._finder.redaction.text(search.text),  # every observer can read it
            who=who or "local",
            total=count.jobs,
            exact=count.exact,
            begun_ms=now_ms(),
        )
        await self.audit.record(
            who, f"{verb} all", jobs=count.jobs, search=bulk.search, outcome="begun"
        )
        self._keep(bulk)
        self._tasks[bulk.id] = asyncio.create_task(self._run(bulk, search))
        return bulk

    def bulk(self, bulk_id: str) -> Bulk:
        """One bulk action."""
        if bulk_id not in self._bulks:
            raise NotFound("there is no such action (any more)")
        return self._bulks[bulk_id]

    def bulks(self) -> list[Bulk]:
        """The latest bulk actions, newest first."""
        return list(reversed(self._bulks.values()))

    async def stop(self, who: str, bulk_id: str) -> Bulk:
        """Stop after the current batch; what is done stays done."""
        bulk = self.bulk(bulk_id)
        task = self._tasks.get(bulk_id)
        if task is not None and bulk.state == "running":
            bulk.state = "stopped"
            await asyncio.gather(task, return_exceptions=True)
            await self.audit.record(who, f"stop {bulk.verb} all", search=bulk.search)
        return bulk

    async def close(self) -> None:
        """Cancel the bulk actions that run."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, bulk: Bulk, search: Search) -> None:
        answers: Counter[str] = Counter()
        whose: set[str] = set()
        try:
            async for jobs in self._finder.each(search, step=_BATCH):
                if bulk.state != "running":
                    break
                answers.update(await self._batch(bulk.verb, jobs))
                whose.update(found.job.requester for found in jobs)
                bulk.seen += len(jobs)
                bulk.done = sum(answers[word] for word in _GOOD)
                bulk.answers = dict(answers)
                await asyncio.sleep(_PAUSE_S)  # lets workers use the store
            else:
                bulk.state = "finished"
        except TenureError as error:
            bulk.state, bulk.error = "failed", str(error)
        except Exception as error:
            _log.exception("bulk_failed", bulk=bulk.id)
            bulk.state, bulk.error = "failed", type(error).__name__
        bulk.ended_ms = now_ms()
        await self.audit.record(
            bulk.who,
            f"{bulk.verb} all",
            whose=whose,
            jobs=bulk.done,
            search=bulk.search,
            outcome=f"{bulk.state}: {_summary(answers)}",
        )

    async def _batch(self, verb: Verb, jobs: Sequence[FoundJob]) -> list[str]:
        by_queue: dict[str, list[str]] = {}
        for found in jobs:
            by_queue.setdefault(found.queue, []).append(found.job.job_id)
        answers: list[str] = []
        for queue, job_ids in by_queue.items():
            answers += await self._do(verb, queue, job_ids)
        return answers

    async def _do(self, verb: Verb, queue: str, job_ids: Sequence[str]) -> list[str]:
        ledger = self._queues[queue].ledger
        match verb:
            case "retry":
                return await ledger.retry(job_ids)
            case "cancel":
                return await ledger.cancel(job_ids)
            case "remove":
                return await ledger.remove(job_ids)
        raise UsageError(f"{verb!r} is not an action; the actions are {', '.join(VERBS)}")

    def _keep(self, bulk: Bulk) -> None:
        self._bulks[bulk.id] = bulk
        over = [each.id for each in self._bulks.values() if each.state != "running"]
        for bulk_id in over[: max(0, len(self._bulks) - _KEPT)]:
            del self._bulks[bulk_id]
            self._tasks.pop(bulk_id, None)


async def _owners(ledger: Ledger, ids: Sequence[str]) -> list[str]:
    """The requesters of the jobs that the audit entry will name."""
    found = await asyncio.gather(*(ledger.get(job_id) for job_id in ids[:IDS_MAX]))
    return [job.requester for job in found if job is not None]


def _summary(answers: Counter[str]) -> str:
    return ", ".join(f"{count} {answer}" for answer, count in answers.most_common(8)) or "no job"
