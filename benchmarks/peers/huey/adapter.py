"""Huey: a list popped by worker threads; what was popped is nowhere but in the worker."""

from __future__ import annotations

from bench_kit import probe, redis_port, serve
from huey import RedisHuey

BEST = 3

huey = RedisHuey("bench", host="127.0.0.1", port=redis_port())


@huey.task()
def noop(number: int) -> None:
    probe.noop()


@huey.task()
def stamp(submitted_ns: int) -> None:
    probe.stamp(submitted_ns)


@huey.task()
def nap(number: int) -> None:
    probe.nap_blocking(number)


TASKS = {"noop": noop, "stamp": stamp, "nap": nap}


class Producer:
    notes = "a result of None is not stored (default)"
    packages = ("huey", "redis", "hiredis")

    def worker(self, concurrency: int | None) -> list[str]:
        flags = ["-k", "thread", "-w", str(concurrency or BEST), "-n", "-q"]
        return ["huey_consumer", "adapter.huey", *flags]

    def submit(self, task: str, argument: int) -> None:
        TASKS[task](argument)

    def unfinished(self) -> int:
        return int(huey.pending_count())


if __name__ == "__main__":
    # It names tasks by their module: the producer must not call it __main__.
    import adapter

    serve(adapter.Producer)
