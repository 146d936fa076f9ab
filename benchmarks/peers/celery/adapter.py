"""Celery on its Redis transport, without a result backend (its default)."""

from __future__ import annotations

from bench_kit import probe, redis_url, serve
from celery import Celery

app = Celery("adapter", broker=redis_url())
app.conf.broker_connection_retry_on_startup = True


@app.task(name="noop")
def noop(number: int) -> None:
    probe.noop()


@app.task(name="stamp")
def stamp(submitted_ns: int) -> None:
    probe.stamp(submitted_ns)


@app.task(name="nap")
def nap(number: int) -> None:
    probe.nap_blocking(number)


TASKS = {"noop": noop, "stamp": stamp, "nap": nap}


class Producer:
    notes = "no result is stored (default); acknowledged before execution (default)"
    packages = ("celery", "kombu", "redis", "hiredis")

    def __init__(self) -> None:
        from redis import Redis

        self.redis = Redis.from_url(redis_url())

    def worker(self, concurrency: int | None) -> list[str]:
        pool = ["-P", "solo"] if concurrency is None else ["-P", "threads", "-c", str(concurrency)]
        return ["celery", "-A", "adapter", "worker", "-l", "ERROR", *pool]

    def submit(self, task: str, argument: int) -> None:
        TASKS[task].delay(argument)

    def unfinished(self) -> int:
        return int(self.redis.llen("celery")) + int(self.redis.hlen("unacked"))


if __name__ == "__main__":
    serve(Producer)
