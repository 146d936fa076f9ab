"""What Tenure's own adapters share: handlers, a producer over any queue, and how one is started.

Everything goes through the public names: `Worker`, `task`, `open_queue`, `open_ledger`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import bench_kit
from bench_kit import probe

from tenure import NewJob, Worker, open_ledger, open_queue, task
from tenure.core.outcome import Outcome
from tenure.worker import Settings


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
        self.packages = ("tenure", "uvloop", *packages)
        self._url = url
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

    async def beside(self, kind: str, rows: int) -> dict[str, Any]:
        """Put rows of a kind into the queue: queued, for later, or finished."""
        more: dict[str, Any] = {"delay_ms": 3_600_000} if kind == "later" else {}
        job = NewJob(task="noop", payload=b"{}", options=self._options, **more)
        for start in range(0, rows, 50_000):
            await self.queue.submit([job] * min(50_000, rows - start))
        while kind == "finished" and (leases := await self.queue.claim(1_000, wait_ms=0)):
            await self.queue.settle([Outcome(lease, "complete") for lease in leases])
        return {}

    async def claims(self, count: int) -> dict[str, Any]:
        """Claim and settle ten jobs so many times; the seconds that each claim took."""
        job = NewJob(task="noop", payload=b"{}", options=self._options)
        await self.queue.submit([job] * 10 * count)
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            leases = await self.queue.claim(10, wait_ms=0)
            seconds.append(time.perf_counter() - began)
            await self.queue.settle([Outcome(lease, "complete") for lease in leases])
        return {"seconds": seconds}

    def deliverer(self, concurrency: int) -> dict[str, Any]:
        """How a user starts the worker that delivers an inbox's events, so many at once."""
        outbox = f"{self._url}{'&' if '?' in self._url else '?'}box=outbox"
        made = [str(Path(sys.executable).with_name("tenure")), "keys", "new-kek", "bench"]
        ring = subprocess.run(made, capture_output=True, text=True, check=True).stdout
        return {
            "argv": [
                *("tenure", "worker", "tenure.transcode"),
                *("--concurrency", str(concurrency), "--queue", outbox),
            ],
            "env": {"TENURE_VAULT_KEYS": ring},
        }

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
    settings: Settings | None = None,
) -> None:
    """Be the worker, or the producer, as the command line says.

    `slots` are those of one worker for jobs that do nothing: one claim takes as many as are free,
    half of them at most.
    """
    if sys.argv[1:] != ["worker"]:
        bench_kit.serve(make)
        return
    concurrency = int(os.environ.get("BENCH_CONCURRENCY", slots))
    Worker([noop, stamp, nap], queues=[url], concurrency=concurrency, settings=settings).run()
