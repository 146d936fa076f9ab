"""Leasehold's inbox on SQLite, through its public names: `Worker`, `task`, `open_queue`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from bench_kit import probe, serve

from leasehold import NewJob, Worker, open_ledger, open_queue, task

BEST = 1_000
"""Slots of one worker for jobs that do nothing: one claim takes as many as are free."""

OPTIONS = {"status_webhook_url": "http://receiver.example/"} if "BENCH_EVENTS" in os.environ else {}
"""With an address each step of a job leaves an event in the outbox, in the same transaction."""

FILE = os.environ["BENCH_SQLITE_FILE"]
SYNCHRONOUS = "normal" if os.environ.get("BENCH_SYNCHRONOUS_COMMIT") == "off" else "full"
URL = f"inbox+sqlite:///{FILE}?synchronous={SYNCHRONOUS}"


@task("noop")
async def noop(job: Any) -> None:
    probe.noop()


class Producer:
    notes = "journal, attempt and fence for every job" + ("; two events too" if OPTIONS else "")
    packages = ("leasehold", "uvloop")

    def __init__(self) -> None:
        self.queue = open_queue(URL)
        self.ledger = open_ledger(URL)

    def worker(self, concurrency: int | None) -> list[str]:
        return ["python", "adapter.py", "worker"]

    async def submit(self, task: str, argument: int) -> None:
        await self.submit_bulk(task, [argument])

    async def submit_bulk(self, task: str, arguments: Iterable[int]) -> None:
        jobs = [
            NewJob(task=task, payload=b'{"argument":%d}' % each, options=OPTIONS)
            for each in arguments
        ]
        if not all(answer.accepted for answer in await self.queue.submit(jobs)):
            raise RuntimeError("not accepted")

    async def unfinished(self) -> int:
        states = (await self.ledger.counts()).states
        return sum(states.values()) - states["succeeded"] - states["dead_letter"]


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        slots = int(os.environ.get("BENCH_CONCURRENCY", BEST))
        Worker([noop], queues=[URL], concurrency=slots).run()
    else:
        serve(Producer)
