"""Oban for Python: fetches as many as are free, acknowledges in batches, keeps what is done."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from typing import Any

from bench_kit import probe, serve, use_uvloop
from oban import Oban, worker
from oban.schema import install

BEST = 100
CHUNK = 1_000
SERVER = os.environ["BENCH_POSTGRES_URL"]
LEFT = "SELECT count(*) FROM oban_jobs WHERE state NOT IN ('completed', 'cancelled', 'discarded')"


@worker(queue="default")
class Noop:
    async def process(self, job: Any) -> None:
        probe.noop()


class Producer:
    notes = "finished jobs are kept for a day (default); a limit of 100"
    packages = ("oban", "psycopg", "uvloop")

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.oban = Oban(pool=pool)

    def worker(self, concurrency: int | None) -> list[str]:
        return ["python", "adapter.py", "worker"]

    async def submit(self, task: str, argument: int) -> None:
        await self.oban.enqueue(Noop.new({"argument": argument}))

    async def submit_bulk(self, task: str, arguments: Iterable[int]) -> None:
        jobs = [Noop.new({"argument": each}) for each in arguments]
        for start in range(0, len(jobs), CHUNK):
            await self.oban.enqueue_many(*jobs[start : start + CHUNK])

    async def unfinished(self) -> int:
        async with self.pool.connection() as connection:
            row = await (await connection.execute(LEFT)).fetchone()
        return int(row[0])


async def make() -> Producer:
    pool = await Oban.create_pool(SERVER)
    await install(pool)
    return Producer(pool)


async def work() -> None:
    pool = await Oban.create_pool(SERVER)
    slots = int(os.environ.get("BENCH_CONCURRENCY", BEST))
    async with Oban(pool=pool, queues={"default": slots}):
        await asyncio.Event().wait()  # until it is ended


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        use_uvloop()
        asyncio.run(work())
    else:
        serve(make)
