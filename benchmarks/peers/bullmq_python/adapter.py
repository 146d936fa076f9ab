"""The `bullmq` package for Python: the same scripts as Node's, one call at a time."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from typing import Any

from bench_kit import probe, redis_port, serve
from bullmq import Queue, Worker

BEST = 100
OPTIONS = {"connection": {"host": "127.0.0.1", "port": redis_port()}}


async def handle(job: Any, token: str) -> None:
    argument = job.data["argument"]
    if job.name == "noop":
        probe.noop()
    elif job.name == "stamp":
        probe.stamp(argument)
    else:
        await probe.nap(argument)


class Producer:
    notes = "completed jobs kept (default), two scripts a job"
    packages = ("bullmq", "redis")

    def __init__(self) -> None:
        self.queue = Queue("bench", OPTIONS)

    def worker(self, concurrency: int | None) -> list[str]:
        return ["python", "adapter.py", "worker"]

    async def submit(self, task: str, argument: int) -> None:
        await self.queue.add(task, {"argument": argument})

    async def submit_bulk(self, task: str, arguments: Iterable[int]) -> None:
        jobs = [{"name": task, "data": {"argument": number}} for number in arguments]
        for start in range(0, len(jobs), 1_000):
            await self.queue.addBulk(jobs[start : start + 1_000])

    async def unfinished(self) -> int:
        counts = await self.queue.getJobCounts("wait", "active", "delayed", "prioritized")
        return sum(counts.values())


async def work() -> None:
    concurrency = int(os.environ.get("BENCH_CONCURRENCY", BEST))
    Worker("bench", handle, {**OPTIONS, "concurrency": concurrency})
    await asyncio.Event().wait()


async def make() -> Producer:
    return Producer()


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        asyncio.run(work())
    else:
        serve(make)
