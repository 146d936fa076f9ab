"""Tenure on a BullMQ queue: its worker, and its producer for BullMQ users."""

from __future__ import annotations

from collections.abc import Iterable

from bench_kit import redis_url
from tenure_kit import main, worker_argv

from tenure import open_ledger
from tenure.contracts.bullmq import open_producer

URL = f"bullmq+{redis_url()}?queue=bench"


class Producer:
    notes = "all that BullMQ writes, completed jobs kept, and the journal"
    packages = ("tenure", "hiredis", "uvloop")

    def __init__(self) -> None:
        self.producer = open_producer(URL)
        self.ledger = open_ledger(URL)

    def worker(self, concurrency: int | None) -> list[str]:
        return worker_argv()

    async def submit(self, task: str, argument: int) -> None:
        await self.producer.add(task, {"argument": argument})

    async def submit_bulk(self, task: str, arguments: Iterable[int]) -> None:
        jobs = [(task, {"argument": number}, {}) for number in arguments]
        for start in range(0, len(jobs), 1_000):
            await self.producer.add_bulk(jobs[start : start + 1_000])

    async def unfinished(self) -> int:
        states = (await self.ledger.counts()).states
        return sum(states[name] for name in ("waiting", "prioritized", "delayed", "active"))


if __name__ == "__main__":
    main(URL, Producer, slots=100)
