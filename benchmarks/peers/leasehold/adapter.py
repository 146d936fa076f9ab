"""Leasehold itself, through its public names: `Worker`, `task`, `open_queue`, `open_ledger`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

from bench_kit import probe, redis_url, serve

from leasehold import NewJob, Worker, open_ledger, open_queue, task
from leasehold.core.lease import Lease, Report

BEST = 1_000
"""Slots of one worker for jobs that do nothing: one claim takes as many as are free."""

CHUNK = 500
URL = f"streams+{redis_url()}"


@task("noop")
async def noop(job: Any) -> None:
    probe.noop()


@task("stamp")
async def stamp(job: Any) -> None:
    probe.stamp(job.payload["argument"])


@task("nap")
async def nap(job: Any) -> None:
    await probe.nap(job.payload["argument"])


class Producer:
    notes = "every effect of the streams contract: hash, events, TTLs, result, journal, ack"
    packages = ("leasehold", "hiredis", "uvloop")

    def __init__(self) -> None:
        self.queue = open_queue(URL)
        self.ledger = open_ledger(URL)
        # Leases of the jobs that SSE clients follow; long, so that nobody has to extend them here.
        self.followed_queue = open_queue(f"{URL}?lease_ms=3600000", worker_id="publisher")
        self.leases: list[Lease] = []

    def worker(self, concurrency: int | None) -> list[str]:
        return ["python", "adapter.py", "worker"]

    async def submit(self, task: str, argument: int) -> None:
        (answer,) = await self.queue.submit([_job(task, argument)])
        _check([answer])

    async def submit_bulk(self, task: str, arguments: Iterable[int]) -> None:
        jobs = [_job(task, argument) for argument in arguments]
        for start in range(0, len(jobs), CHUNK):
            _check(await self.queue.submit(jobs[start : start + CHUNK]))

    async def unfinished(self) -> int:
        states = (await self.ledger.counts()).states
        return states["queued"] + states["running"]

    def gateway(self, port: int) -> dict[str, Any]:
        """How a user starts the gateway."""
        argv = ["leasehold", "gateway", "--from", URL, "--port", str(port)]
        return {"argv": argv, "body": '{"task": "chat", "payload": {"prompt": "hello"}}'}

    async def follow(self, count: int) -> dict[str, Any]:
        """Start `count` jobs that clients can follow; answers their ids."""
        await self.submit_bulk("nap", range(count))
        while len(self.leases) < count:
            self.leases += await self.followed_queue.claim(CHUNK, wait_ms=1_000)
        return {"job_ids": [lease.job_id for lease in self.leases]}

    async def publish(self, rate: int, seconds: float) -> dict[str, Any]:
        """One event at a time, spread over the followed jobs, `rate` a second in all."""
        began, count = time.monotonic(), int(rate * seconds)
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            lease = self.leases[number * 7919 % len(self.leases)]
            data = b'{"t":%d}' % time.monotonic_ns()
            (refused,) = await self.followed_queue.report([Report(lease=lease, data=data)])
            if refused is not None:
                raise refused
        return {"count": count, "seconds": time.monotonic() - began}


def _job(name: str, argument: int) -> NewJob:
    return NewJob(task=name, payload=b'{"argument":%d}' % argument)


def _check(answers: Iterable[Any]) -> None:
    for answer in answers:
        if not answer.accepted:
            raise RuntimeError(f"not accepted: {answer}")


def work() -> None:
    slots = int(os.environ.get("BENCH_CONCURRENCY", BEST))
    Worker([noop, stamp, nap], queues=[URL], concurrency=slots).run()


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        work()
    else:
        serve(Producer)
