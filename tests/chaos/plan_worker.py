"""A worker of scheduled and chained tasks, which kills itself at the worst moment if it is told to.

`python -m tests.chaos.plan_worker URL [swap|settle]`: with a word it dies, as by kill -9, when it
is about to record that a scheduled job is stored, or to settle a job whose next one is stored.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

from tenure import Job, Worker, task
from tenure.core.registry import open_queue
from tenure.plans import schedule as schedules
from tenure.worker.config import Settings

EVERY_MS = 200


@task("tick", every_s=EVERY_MS / 1000, missed="all")
async def tick(job: Job) -> None:
    """Does nothing: what counts is how often it is stored."""


@task("add")
async def add(job: Job, n: int) -> int:
    """Its number, and the results before it."""
    before: list[int] = list(await job.children)
    return n + sum(before)


def die(*_: Any, **__: Any) -> NoReturn:
    """End this process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def main(url: str, dies_at: str = "") -> None:
    """Serve the queue until killed."""
    if dies_at == "swap":
        schedules._after = die

    def opened() -> Any:
        queue: Any = open_queue(url, worker_id=f"plan-{os.getpid()}")
        if dies_at == "settle":
            queue.settle = die
        return queue

    tasks = [tick] if dies_at != "settle" else [add]
    Worker(tasks, queues=[opened], settings=Settings(upkeep_ms=100)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
