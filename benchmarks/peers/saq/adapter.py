"""SAQ: a list moved by BLMOVE, one JSON document a job."""

from __future__ import annotations

import os
from typing import Any

from bench_kit import probe, redis_url, serve, use_uvloop
from saq import Queue

BEST = 20

use_uvloop()  # its command takes the loop of the policy
queue = Queue.from_url(redis_url())


async def noop(ctx: dict[str, Any], *, argument: int) -> None:
    probe.noop()


async def stamp(ctx: dict[str, Any], *, argument: int) -> None:
    probe.stamp(argument)


async def nap(ctx: dict[str, Any], *, argument: int) -> None:
    await probe.nap(argument)


settings = {
    "queue": queue,
    "functions": [noop, stamp, nap],
    "concurrency": int(os.environ.get("BENCH_CONCURRENCY", BEST)),
}


class Producer:
    notes = "result kept in the job document (default)"
    packages = ("saq", "redis", "hiredis", "uvloop")

    def worker(self, concurrency: int | None) -> list[str]:
        return ["saq", "adapter.settings", "--workers", "1"]

    async def submit(self, task: str, argument: int) -> None:
        await queue.enqueue(task, argument=argument)

    async def unfinished(self) -> int:
        return int(await queue.count("incomplete"))


async def make() -> Producer:
    await queue.connect()
    return Producer()


if __name__ == "__main__":
    serve(make)
