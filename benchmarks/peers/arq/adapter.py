"""arq: a sorted set polled by the worker, results as pickled keys."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from arq import create_pool
from arq.connections import ArqRedis, RedisSettings
from arq.constants import default_queue_name
from bench_kit import probe, redis_url, serve, use_uvloop

BEST = 100
"""Ten, its default, gives a fifth of the speed: the next poll waits for a free slot."""


use_uvloop()  # its command takes the loop of the policy


async def noop(ctx: dict[str, Any], number: int) -> None:
    probe.noop()


async def stamp(ctx: dict[str, Any], submitted_ns: int) -> None:
    probe.stamp(submitted_ns)


async def nap(ctx: dict[str, Any], number: int) -> None:
    await probe.nap(number)


class WorkerSettings:
    functions: ClassVar = [noop, stamp, nap]
    redis_settings = RedisSettings.from_dsn(redis_url())
    max_jobs = int(os.environ.get("BENCH_CONCURRENCY", BEST))


quiet: dict[str, Any] = {"version": 1, "root": {"level": "WARNING"}}


class Producer:
    notes = "result kept in Redis (default)"
    packages = ("arq", "redis", "hiredis", "uvloop")

    def __init__(self, pool: ArqRedis) -> None:
        self.pool = pool

    def worker(self, concurrency: int | None) -> list[str]:
        return ["arq", "adapter.WorkerSettings", "--custom-log-dict", "adapter.quiet"]

    async def submit(self, task: str, argument: int) -> None:
        await self.pool.enqueue_job(task, argument)

    async def unfinished(self) -> int:
        return int(await self.pool.zcard(default_queue_name))


async def make() -> Producer:
    return Producer(await create_pool(WorkerSettings.redis_settings))


if __name__ == "__main__":
    serve(make)
