"""taskiq over Redis Streams: acknowledged after execution, no results unless a backend is added."""

from __future__ import annotations

from bench_kit import probe, redis_url, serve
from taskiq_redis import RedisStreamBroker

BEST = 100

# Not "$", its default: jobs enqueued before the first worker starts would be skipped.
broker = RedisStreamBroker(redis_url(), consumer_id="0")


@broker.task
async def noop(number: int) -> None:
    probe.noop()


@broker.task
async def stamp(submitted_ns: int) -> None:
    probe.stamp(submitted_ns)


@broker.task
async def nap(number: int) -> None:
    await probe.nap(number)


TASKS = {"noop": noop, "stamp": stamp, "nap": nap}


class Producer:
    notes = "no result is stored"
    packages = ("taskiq", "taskiq-redis", "redis", "hiredis", "uvloop")

    def worker(self, concurrency: int | None) -> list[str]:
        slots = str(concurrency or BEST)
        flags = ["--workers", "1", "--max-async-tasks", slots, "--log-level", "WARNING"]
        return ["taskiq", "worker", *flags, "adapter:broker"]

    async def submit(self, task: str, argument: int) -> None:
        await TASKS[task].kiq(argument)

    async def unfinished(self) -> int:
        from redis.asyncio import Redis

        async with Redis(connection_pool=broker.connection_pool) as redis:
            (group,) = await redis.xinfo_groups(broker.queue_name)
        return int(group["pending"]) + int(group["lag"] or 0)


async def make() -> Producer:
    await broker.startup()
    return Producer()


if __name__ == "__main__":
    serve(make)
