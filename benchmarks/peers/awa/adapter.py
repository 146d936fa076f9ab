"""Awa: a Rust core with Python handlers, on its queue storage."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import awa
from bench_kit import probe, serve, use_uvloop

BEST = 256
CHUNK = 1_000
SERVER = os.environ["BENCH_POSTGRES_URL"]


@dataclass
class Noop:
    argument: int


class Producer:
    notes = "queue storage, 256 workers, bulk by COPY; its clock stops with its last handler"
    packages = ("awa-pg", "uvloop")

    def __init__(self, client: Any) -> None:
        self.client = client

    def worker(self, concurrency: int | None) -> list[str]:
        return ["python", "adapter.py", "worker"]

    async def submit(self, task: str, argument: int) -> None:
        await self.client.insert(Noop(argument), kind=task)

    async def submit_bulk(self, task: str, arguments: Iterable[int]) -> None:
        jobs = [Noop(each) for each in arguments]
        for start in range(0, len(jobs), CHUNK):
            await self.client.enqueue_many_copy(jobs[start : start + CHUNK], kind=task)

    async def unfinished(self) -> int:
        """Its counts are rolled up later and dear to ask for: in its favour, nothing is left."""
        return 0


async def make() -> Producer:
    client = awa.AsyncClient(SERVER)
    await client.migrate()
    await client.install_queue_storage()
    return Producer(client)


async def work() -> None:
    client = awa.AsyncClient(SERVER, max_connections=20)

    @client.task(Noop, kind="noop")
    async def noop(job: Any) -> None:
        probe.noop()

    await client.start([("default", int(os.environ.get("BENCH_CONCURRENCY", BEST)))])
    await asyncio.Event().wait()  # until it is ended


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        use_uvloop()
        asyncio.run(work())
    else:
        serve(make)
