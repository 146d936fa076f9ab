"""streaQ: Redis Streams with Lua, results pickled, over coredis."""

from __future__ import annotations

import os
from collections.abc import Iterable

from bench_kit import probe, redis_url, serve
from streaq import Worker

BEST = 64
CHUNK = 1_000

worker = Worker(
    redis_url=redis_url(),
    concurrency=int(os.environ.get("BENCH_CONCURRENCY", BEST)),
    anyio_kwargs={"use_uvloop": True},
)


@worker.task
async def noop(number: int) -> None:
    probe.noop()


@worker.task
async def stamp(submitted_ns: int) -> None:
    probe.stamp(submitted_ns)


@worker.task
async def nap(number: int) -> None:
    await probe.nap(number)


TASKS = {"noop": noop, "stamp": stamp, "nap": nap}


class Producer:
    notes = "result kept in Redis (default)"
    packages = ("streaq", "coredis", "hiredis", "uvloop")

    def worker(self, concurrency: int | None) -> list[str]:
        return ["streaq", "run", "adapter:worker"]

    async def submit(self, task: str, argument: int) -> None:
        await TASKS[task].enqueue(argument)

    async def submit_bulk(self, task: str, arguments: Iterable[int]) -> None:
        function, batch = TASKS[task], []
        for argument in arguments:
            batch.append(function.enqueue(argument))
            if len(batch) == CHUNK:
                await worker.enqueue_many(batch)
                batch = []
        if batch:
            await worker.enqueue_many(batch)

    async def unfinished(self) -> int:
        return int(await worker.queue_size())


async def make() -> Producer:
    await worker.__aenter__()
    return Producer()


if __name__ == "__main__":
    serve(make)
