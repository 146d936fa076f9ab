"""PgQueuer on asyncpg; batches of 200 were its best of those tried."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable

import asyncpg
from bench_kit import probe, serve, use_uvloop
from pgqueuer import Job, PgQueuer, Queries

BEST = 200
CHUNK = 1_000
SERVER = os.environ["BENCH_POSTGRES_URL"]


class Producer:
    notes = "jobs are deleted and a log row is written; batches of 200"
    packages = ("pgqueuer", "asyncpg", "uvloop")

    def __init__(self, queries: Queries) -> None:
        self.queries = queries

    def worker(self, concurrency: int | None) -> list[str]:
        return ["python", "adapter.py", "worker"]

    async def submit(self, task: str, argument: int) -> None:
        await self.queries.enqueue(task, str(argument).encode())

    async def submit_bulk(self, task: str, arguments: Iterable[int]) -> None:
        numbers = list(arguments)
        for start in range(0, len(numbers), CHUNK):
            part: list[bytes | None] = [
                str(each).encode() for each in numbers[start : start + CHUNK]
            ]
            await self.queries.enqueue([task] * len(part), part, [0] * len(part))

    async def unfinished(self) -> int:
        return sum(row.count for row in await self.queries.queue_size())


async def make() -> Producer:
    connection = await asyncpg.connect(SERVER)
    queries = Queries.from_asyncpg_connection(connection)
    await queries.install()
    return Producer(queries)


async def work() -> None:
    pool = await asyncpg.create_pool(SERVER, min_size=4, max_size=4)
    queuer = PgQueuer.from_asyncpg_pool(pool)

    @queuer.entrypoint("noop")
    async def noop(job: Job) -> None:
        probe.noop()

    batch = int(os.environ.get("BENCH_CONCURRENCY", BEST))
    await queuer.run(batch_size=batch)


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        use_uvloop()
        asyncio.run(work())
    else:
        serve(make)
