"""What runs in a simulated process: a real worker, a submitter, an operator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

from tenure.contracts.memory import MemoryQueue
from tenure.core.encoding import short_hash
from tenure.core.errors import LeaseLost, StoreError
from tenure.core.job import NewJob, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Cancel, Fatal, Outcome, Retry, Snooze, Verdict
from tenure.core.retry import RetryPolicy
from tenure.core.seam import Upkeep
from tenure.worker import Job, Settings, Task, task
from tests.chaos.verdict import Observation

LEASE_MS = 1_000
TASK = "work"

# What a handler may do at one of its starts. The last entry of a plan always ends the job.
BEHAVIOURS = ("ok", "ok", "ok", "fail", "retry", "snooze", "slow", "late", "report", "cancel")
ENDINGS = ("ok", "ok", "ok", "fatal", "cancel")

SETTINGS = Settings(
    concurrency=4,
    claim_wait_ms=300,
    claim_batch_max=4,
    settle_batch_max=4,
    keeper_threaded=False,
    keeper_ms_max=250,
    upkeep_ms=500,
    backoff_ms=20,
    backoff_ms_max=200,
    cancel_grace_ms=150,
    drain_ms=1_500,
    flush_ms=1_000,
    uvloop=False,
)


class Observed:
    """A queue that writes log B: what its node saw of every submit and settle."""

    def __init__(
        self, queue: MemoryQueue, node: str, now_ms: Callable[[], int], log: list[Observation]
    ) -> None:
        self.slots = 0
        self.features = queue.features
        self._queue = queue
        self._node = node
        self._now_ms = now_ms
        self._log = log

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        begin_ms = self._now_ms()
        try:
            answers = await self._queue.submit(jobs)
        except StoreError:
            for job in jobs:
                self._saw("submit", "info", begin_ms, job_id=job.job_id)
            raise
        for answer in answers:
            result = "ok" if answer.accepted else "fail"
            self._saw("submit", result, begin_ms, job_id=answer.job_id, answer=answer.status)
        return answers

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        begin_ms = self._now_ms()
        try:
            verdicts = await self._queue.settle(outcomes)
        except StoreError:
            for outcome in outcomes:
                self._saw("settle", "info", begin_ms, **_asked(outcome))
            raise
        for outcome, verdict in zip(outcomes, verdicts, strict=True):
            answer = type(verdict).__name__
            self._saw("settle", "ok", begin_ms, answer=answer, **_asked(outcome))
        return verdicts

    async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
        return await self._queue.claim(limit, wait_ms=wait_ms)

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        return await self._queue.extend(leases)

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        return await self._queue.report(reports)

    async def upkeep(self) -> Upkeep:
        return await self._queue.upkeep()

    async def close(self) -> None:
        await self._queue.close()

    def _saw(self, op: Any, result: Any, begin_ms: int, **what: Any) -> None:
        seen = {"begin_ms": begin_ms, "end_ms": self._now_ms(), "node": self._node}
        self._log.append(Observation(op=op, result=result, **seen, **what))


def _asked(outcome: Outcome) -> dict[str, Any]:
    result_h = short_hash(outcome.result) if outcome.kind == "complete" else ""
    lease = outcome.lease
    return {
        "job_id": lease.job_id,
        "fence": lease.fence,
        "kind": outcome.kind,
        "result_h": result_h,
    }


def make_task(rng: Random) -> Task:
    """A handler that follows the plan in its payload, one entry per start."""

    @task(TASK, retry=RetryPolicy(max_attempts=4, delay_ms=100, delay_ms_max=500))
    async def work(job: Job) -> Any:
        plan = job.payload["plan"]
        behaviour = plan[min(job.lease.fence, len(plan)) - 1]
        await asyncio.sleep(rng.random() * 0.05)
        await _behave(job, behaviour, rng)
        return {"job": job.id, "fence": job.lease.fence}

    return work


async def _behave(job: Job, behaviour: str, rng: Random) -> None:
    match behaviour:
        case "fail":
            raise ValueError("as planned")
        case "retry":
            raise Retry(after=rng.random() * 0.5)
        case "snooze":
            raise Snooze(after=rng.random() * 0.5)
        case "fatal":
            raise Fatal("as planned")
        case "cancel":
            raise Cancel("as planned")
        case "slow":
            await asyncio.sleep(LEASE_MS / 1000 * (0.3 + rng.random() * 0.7))
        case "late":  # longer than the lease: the keeper has to hold it
            await asyncio.sleep(LEASE_MS / 1000 * (1.2 + rng.random() * 1.5))
        case "report":
            for percent in (25, 75):
                await job.report(percent, "half way")
                await asyncio.sleep(rng.random() * 0.2)


def new_job(job_id: str, rng: Random) -> NewJob:
    """A job with a plan drawn from the seed."""
    plan = [rng.choice(BEHAVIOURS) for _ in range(rng.randrange(3))] + [rng.choice(ENDINGS)]
    return NewJob(
        job_id=job_id,
        task=TASK,
        payload=msgspec.json.encode({"plan": plan}),
        delay_ms=rng.choice((0, 0, 0, 0, 300)),
        max_attempts=rng.choice((1, 2, 3, 5)),
        ttl_ms=rng.choice((None, None, None, 20_000)),
        priority=rng.choice((0, 0, 1)),
    )


async def submit_all(queue: Observed, jobs: Sequence[NewJob], rng: Random, span_s: float) -> None:
    """Submit jobs one by one over a while, each again and again until it is answered."""
    for job in jobs:
        await asyncio.sleep(rng.random() * 2 * span_s / len(jobs))
        while True:
            try:
                await queue.submit([job])
                break
            except StoreError:
                await asyncio.sleep(0.05 + rng.random() * 0.2)
