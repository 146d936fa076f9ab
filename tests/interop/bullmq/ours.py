"""Our worker beside Node: handlers that do what their job's data says, and a worker to run them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from tenure import Fatal, Worker, task
from tenure.worker.config import Settings
from tests.waiting import DEADLINE_S, until


@task("*")
async def obey(job: Any) -> Any:
    """What driver.cjs does, in Python."""
    data = job.payload or {}
    if "progress" in data:
        await job.report(data["progress"])
    if "log" in data:
        await job.log(data["log"])
    if "ms" in data:
        await asyncio.sleep(data["ms"] / 1000)
    if data.get("do") == "fatal":
        raise Fatal(data.get("why", "fatal"))
    failing = data.get("do") == "fail" or (
        data.get("do") == "flaky" and job.attempt <= data["times"]
    )
    if failing:
        raise RuntimeError(data.get("why", "failed on purpose"))
    return data.get("result", {"ok": job.id})


@asynccontextmanager
async def worker(
    *urls: str, concurrency: int = 10, name: str = "", handler: Any = obey
) -> AsyncGenerator[Worker]:
    """A running worker; stopped, with everything settled, when the block ends."""
    settings = Settings(worker_id=name, concurrency=concurrency)
    running = Worker([handler], queues=list(urls), settings=settings)
    serving = asyncio.create_task(running.serve())
    try:
        await asyncio.sleep(0)  # lets it begin: before that it has no health to tell of
        await until(lambda: running.health().ready, "the worker is ready")
        yield running
    finally:
        running.stop()
        await asyncio.wait_for(serving, DEADLINE_S)
