"""Leasehold's inbox on PostgreSQL, through its public names: `Worker`, `task`, `open_queue`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from bench_kit import probe, serve

from leasehold import NewJob, Worker, open_ledger, open_queue, task
from leasehold.ledger.migrating import PostgresMigrations, migrate
from leasehold.store.postgres import Postgres

BEST = 400
"""Slots of one worker for jobs that do nothing: one claim takes as many as are free."""

OPTIONS = {"status_webhook_url": "http://receiver.example/"} if "BENCH_EVENTS" in os.environ else {}
"""With an address each step of a job leaves an event in the outbox, in the same transaction."""

SERVER = os.environ["BENCH_POSTGRES_URL"]
SYNCHRONOUS = "normal" if os.environ.get("BENCH_SYNCHRONOUS_COMMIT") == "off" else "full"
URL = f"inbox+{SERVER}?synchronous={SYNCHRONOUS}"


@task("noop")
async def noop(job: Any) -> None:
    probe.noop()


class Producer:
    notes = "journal, attempt and fence for every job" + ("; two events too" if OPTIONS else "")
    packages = ("leasehold", "asyncpg", "uvloop")

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


async def make() -> Producer:
    database = Postgres(SERVER, schema="leasehold")
    await migrate(PostgresMigrations(database), "postgres")
    await database.close()
    producer = Producer()
    await producer.queue.claim(1, wait_ms=0)  # connected: what is timed is the work
    return producer


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        slots = int(os.environ.get("BENCH_CONCURRENCY", BEST))
        Worker([noop], queues=[URL], concurrency=slots).run()
    else:
        serve(make)
