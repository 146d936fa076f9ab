"""A real worker on a stage, for the suite: it serves until a condition holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tenure.worker import Worker
from tenure.worker.config import Settings
from tenure.worker.task import Task
from tests.contract.adapters import Stage

DEADLINE_S = 20.0
# A worker that stops waits for the claim that is under way, half a second by default.
QUICK: dict[str, Any] = {"concurrency": 4, "claim_wait_ms": 50}


@asynccontextmanager
async def serving(stage: Stage, *tasks: Task, **settings: Any) -> AsyncGenerator[Worker]:
    """A worker of these tasks on the stage's queue, in this loop; drained at the end."""
    worker = Worker(tasks, queues=[stage.url], settings=Settings(**QUICK | settings))
    served = asyncio.ensure_future(worker.serve())
    try:
        yield worker
    finally:
        worker.stop()
        await served


async def until(
    stage: Stage, holds: Callable[[], Awaitable[Any]], *, step_ms: int = 20, deadline_s: float = 0
) -> Any:
    """What `holds` answers as soon as that is true, while the store's clock goes on."""
    deadline = time.monotonic() + (deadline_s or DEADLINE_S)
    while not (answer := await holds()):
        assert time.monotonic() < deadline, "it did not come true in time"
        await stage.advance(step_ms)
        await asyncio.sleep(0.01)  # the clock of a store in memory passes no real time
    return answer
