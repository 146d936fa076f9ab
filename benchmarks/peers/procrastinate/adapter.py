"""Procrastinate: one job a fetch, its finished jobs stay in the table."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable

from bench_kit import probe, serve, use_uvloop
from procrastinate import App, PsycopgConnector

BEST = 50
CHUNK = 1_000
app = App(connector=PsycopgConnector(conninfo=os.environ["BENCH_POSTGRES_URL"]))


@app.task(name="noop")
async def noop(argument: int) -> None:
    probe.noop()


class Producer:
    notes = "finished jobs are kept (default); 50 at once"
    packages = ("procrastinate", "psycopg", "uvloop")

    def worker(self, concurrency: int | None) -> list[str]:
        return ["python", "adapter.py", "worker"]

    async def submit(self, task: str, argument: int) -> None:
        await noop.defer_async(argument=argument)

    async def submit_bulk(self, task: str, arguments: Iterable[int]) -> None:
        numbers = list(arguments)
        for start in range(0, len(numbers), CHUNK):
            part = [{"argument": each} for each in numbers[start : start + CHUNK]]
            await noop.batch_defer_async(*part)

    async def unfinished(self) -> int:
        queues = await app.job_manager.list_queues_async()
        return sum(queue["todo"] + queue["doing"] for queue in queues)


async def make() -> Producer:
    await app.open_async()
    await app.schema_manager.apply_schema_async()
    return Producer()


async def work() -> None:
    async with app.open_async():
        slots = int(os.environ.get("BENCH_CONCURRENCY", BEST))
        await app.run_worker_async(concurrency=slots, install_signal_handlers=False)


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        use_uvloop()
        asyncio.run(work())
    else:
        serve(make)
