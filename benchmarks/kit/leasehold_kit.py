"""What Leasehold's own adapters share: handlers, a producer over any queue, and how one is started.

Everything goes through the public names: `Worker`, `task`, `open_queue`, `open_ledger`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import bench_kit
from bench_kit import probe

from leasehold import NewJob, Worker, open_ledger, open_queue, task


@task("noop")
async def noop(job: Any) -> None:
    probe.noop()


@task("stamp")
async def stamp(job: Any) -> None:
    probe.stamp(job.payload["argument"])


@task("nap")
async def nap(job: Any) -> None:
    await probe.nap(job.payload["argument"])


class QueueProducer:
    """Submits to the queue of a URL, `chunk` jobs a call; jobs in a state of `ended` are done."""

    def __init__(
        self,
        url: str,
        *packages: str,
        notes: str,
        chunk: int,
        ended: tuple[str, ...],
        options: dict[str, Any] | None = None,
    ) -> None:
        self.notes = notes
        self.packages = ("leasehold", "uvloop", *packages)
        self.queue = open_queue(url)
        self.ledger = open_ledger(url)
        self._chunk = chunk
        self._ended = ended
        self._options = options or {}

    def worker(self, concurrency: int | None) -> list[str]:
        return worker_argv()

    async def submit(self, task: str, argument: int) -> None:
        await self.submit_bulk(task, (argument,))

    async def submit_bulk(self, task: str, arguments: Iterable[int]) -> None:
        jobs = [
            NewJob(task=task, payload=b'{"argument":%d}' % each, options=self._options)
            for each in arguments
        ]
        for start in range(0, len(jobs), self._chunk):
            for answer in await self.queue.submit(jobs[start : start + self._chunk]):
                if not answer.accepted:
                    raise RuntimeError(f"not accepted: {answer}")

    async def unfinished(self) -> int:
        states = (await self.ledger.counts()).states
        return sum(count for state, count in states.items() if state not in self._ended)


def worker_argv() -> list[str]:
    """How the harness starts the worker of an adapter that calls `main`."""
    return ["python", "adapter.py", "worker"]


def main(
    url: str,
    make: Callable[[], bench_kit.Producer | Coroutine[Any, Any, bench_kit.Producer]],
    *,
    slots: int,
) -> None:
    """Be the worker, or the producer, as the command line says.

    `slots` are those of one worker for jobs that do nothing: one claim takes as many as are free.
    """
    if sys.argv[1:] != ["worker"]:
        bench_kit.serve(make)
        return
    concurrency = int(os.environ.get("BENCH_CONCURRENCY", slots))
    Worker([noop, stamp, nap], queues=[url], concurrency=concurrency).run()
