"""Leasehold on a BullMQ queue: its worker, and its producer for BullMQ users."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from bench_kit import probe, redis_url, serve

from leasehold import Worker, open_ledger, task
from leasehold.contracts.bullmq import open_producer

BEST = 100
URL = f"bullmq+{redis_url()}?queue=bench"


@task("noop")
async def noop(job: Any) -> None:
    probe.noop()


@task("stamp")
async def stamp(job: Any) -> None:
    probe.stamp(job.payload["argument"])


@task("nap")
async def nap(job: Any) -> None:
    await probe.nap(job.payload["argument"])


class Producer:
    notes = "all that BullMQ writes, completed jobs kept, and the journal"
    packages = ("leasehold", "hiredis", "uvloop")

    def __init__(self) -> None:
        self.producer = open_producer(URL)
        self.ledger = open_ledger(URL)

    def worker(self, concurrency: int | None) -> list[str]:
        return ["python", "adapter.py", "worker"]

    async def submit(self, task: str, argument: int) -> None:
        await self.producer.add(task, {"argument": argument})

    async def submit_bulk(self, task: str, arguments: Iterable[int]) -> None:
        jobs = [(task, {"argument": number}, {}) for number in arguments]
        for start in range(0, len(jobs), 1_000):
            await self.producer.add_bulk(jobs[start : start + 1_000])

    async def unfinished(self) -> int:
        states = (await self.ledger.counts()).states
        return sum(states[name] for name in ("waiting", "prioritized", "delayed", "active"))


def work() -> None:
    slots = int(os.environ.get("BENCH_CONCURRENCY", BEST))
    Worker([noop, stamp, nap], queues=[URL], concurrency=slots).run()


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        work()
    else:
        serve(Producer)
