"""Tenure on an OmniQ queue: its worker, or the contract's own `consume`, and its client."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from typing import Any

from bench_kit import probe, redis_url, serve, use_uvloop

from tenure import Worker, open_ledger, task
from tenure.contracts.omniq import Client, JobContext
from tenure.core.outcome import Failure, Outcome
from tenure.core.registry import open_queue
from tenure.store.redis import Redis

BEST = 1_000
CONSUME = 0
QUEUE = "bench"
GROUPS = 1_000
URL = f"omniq+{redis_url()}?queue={QUEUE}"


@task(QUEUE)
async def handle(job: Any) -> None:
    match job.payload["task"]:
        case "noop" | "grouped":
            probe.noop()
        case "stamp":
            probe.stamp(job.payload["argument"])
        case _:
            await probe.nap(job.payload["argument"])


async def handle_context(ctx: JobContext) -> None:
    if ctx.payload["task"] == "stamp":
        probe.stamp(ctx.payload["argument"])
    else:
        probe.noop()


class Producer:
    notes = "all that OmniQ writes, the last 100 completed jobs kept, and the journal"
    packages = ("tenure", "hiredis", "uvloop")

    def __init__(self) -> None:
        self.client = Client(redis_url())
        self.redis = Redis(redis_url())
        self.ledger = open_ledger(URL)

    def worker(self, concurrency: int | None) -> list[str]:
        # The harness's word for the contract's own consumer: concurrency is a matter of the worker.
        return ["python", "adapter.py", "consume" if concurrency == CONSUME else "worker"]

    async def submit(self, task: str, argument: int) -> None:
        payload, options = _job(task, argument)
        await self.client.publish(QUEUE, payload, **options)

    async def submit_bulk(self, task: str, arguments: Iterable[int]) -> None:
        await self.client.publish_many(QUEUE, [_job(task, number) for number in arguments])

    async def unfinished(self) -> int:
        states = (await self.ledger.counts()).states
        return states["wait"] + states["delayed"] + states["active"]

    async def blocked(self, count: int) -> dict[str, Any]:
        """The longest script of removing, and of sending back, a hundred jobs out of many."""
        jobs: list[tuple[Any, dict[str, Any]]] = [
            ({"argument": number}, {"max_attempts": 1}) for number in range(count)
        ]
        ids = await self.client.publish_many(QUEUE, jobs)
        middle = ids[count // 2 : count // 2 + 100]
        removing = await self._longest(self.client.remove_jobs_batch(QUEUE, "wait", middle))
        failed = await _fail(count - 100)
        middle = failed[count // 2 : count // 2 + 100]
        sending = await self._longest(self.client.retry_failed_batch(QUEUE, middle))
        return {"ms": max(removing, sending)}

    async def _longest(self, call: Any) -> float:
        await self.redis.call("CONFIG", "SET", "slowlog-max-len", 10_000)
        await self.redis.call("CONFIG", "SET", "slowlog-log-slower-than", 0)
        await self.redis.call("SLOWLOG", "RESET")
        items = await call
        assert {item.status for item in items} == {"OK"}
        entries = await self.redis.call("SLOWLOG", "GET", 10_000)
        await self.redis.call("CONFIG", "SET", "slowlog-log-slower-than", 10_000)
        return max(entry[2] for entry in entries if entry[3][0].startswith(b"EVAL")) / 1e3


async def _fail(count: int) -> list[str]:
    """Fail waiting jobs by the hundred; their ids."""
    queue, failed = open_queue(f"{URL}&keep_failed=0"), []
    failure = Failure(code="bench", message="as planned")
    try:
        while len(failed) < count:
            leases = await queue.claim(500, wait_ms=0)
            await queue.settle([Outcome(each, "bury", failure=failure) for each in leases])
            failed += [lease.job_id for lease in leases]
    finally:
        await queue.close()
    return failed


def _job(task: str, argument: int) -> tuple[dict[str, Any], dict[str, Any]]:
    options = {"gid": f"g{argument % GROUPS}"} if task == "grouped" else {}
    return {"task": task, "argument": argument}, options


def work() -> None:
    slots = int(os.environ.get("BENCH_CONCURRENCY", BEST))
    Worker([handle], queues=[URL], concurrency=slots).run()


async def consume() -> None:
    async with Client(redis_url()) as client:
        await client.consume(QUEUE, handle_context, concurrency=BEST)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["worker"]:
            work()
        case ["consume"]:
            use_uvloop()
            asyncio.run(consume())
        case _:
            serve(Producer)
