"""RQ: a list and a hash a job. Its fastest worker runs jobs in its own process, without forking."""

from __future__ import annotations

from collections.abc import Iterable

from bench_kit import probe, redis_url, serve
from redis import Redis
from rq import Queue

CHUNK = 1_000


def noop(number: int) -> None:
    probe.noop()


def stamp(submitted_ns: int) -> None:
    probe.stamp(submitted_ns)


def nap(number: int) -> None:
    probe.nap_blocking(number)


class Producer:
    notes = "SimpleWorker, one job at a time; result kept (default)"
    packages = ("rq", "redis", "hiredis")

    def __init__(self) -> None:
        self.redis = Redis.from_url(redis_url())
        self.queue = Queue("default", connection=self.redis)

    def worker(self, concurrency: int | None) -> list[str]:
        where = ["--url", redis_url(), "--quiet", "default"]
        if concurrency is None:
            return ["rq", "worker", "--worker-class", "rq.worker.SimpleWorker", *where]
        # It has no concurrency within a process: its own way to run ten at once is a pool.
        return ["rq", "worker-pool", "--num-workers", str(concurrency), *where]

    def submit(self, task: str, argument: int) -> None:
        self.queue.enqueue(f"adapter.{task}", argument)

    def submit_bulk(self, task: str, arguments: Iterable[int]) -> None:
        function, batch = f"adapter.{task}", []
        for argument in arguments:
            batch.append(Queue.prepare_data(function, (argument,)))
            if len(batch) == CHUNK:
                self.queue.enqueue_many(batch)
                batch = []
        if batch:
            self.queue.enqueue_many(batch)

    def unfinished(self) -> int:
        waiting = self.queue.count + self.redis.llen(self.queue.intermediate_queue_key)
        return int(waiting) + len(self.queue.started_job_registry)


if __name__ == "__main__":
    serve(Producer)
