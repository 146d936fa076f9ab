"""The tasks that a chaos herd runs: `tenure worker tests.chaos.app`.

A job's payload says what its handler shall do (`do`, `ms`). Before and after, the handler leaves a
line in a file of its own process, so that what really ran is known without asking the store.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from tenure import Job, task
from tests.chaos.effects import note_effect


class FirstTime(Exception):
    """What a job that shall be retried fails with at its first attempt."""


@task("*")
async def in_the_loop(job: Job) -> dict[str, Any]:
    """Everything that an `async def` handler may do to its worker."""
    seen = _started(job)
    ms = job.payload.get("ms", 0)
    match job.payload.get("do", "work"):
        case "block":
            time.sleep(ms / 1000)  # to block the loop is what is tested
        case "spin":
            _spin(ms)
        case "report":
            for step in range(3):
                await job.report({"step": step}, "chaos.step")
                await asyncio.sleep(ms / 3000)
        case "fail_once" if job.attempt == 1:
            await asyncio.sleep(ms / 1000)
            note_effect("fail", job.lease)
            raise FirstTime("the first attempt fails as planned")
        case "exit":
            await asyncio.sleep(ms / 1000)
            os._exit(17)
        case _:
            await asyncio.sleep(ms / 1000)
    return seen()


@task("tool")
def in_a_thread(job: Job) -> dict[str, Any]:
    """A handler in a thread of the worker, which can only sleep or spin."""
    seen = _started(job)
    if job.payload.get("do") == "spin":
        _spin(job.payload["ms"])
    else:
        time.sleep(job.payload.get("ms", 0) / 1000)
    return seen()


def _started(job: Job) -> Callable[[], dict[str, Any]]:
    lease = job.lease
    note_effect("start", lease)

    def ended() -> dict[str, Any]:
        note_effect("end", lease)
        return {"n": job.payload.get("n"), "fence": lease.fence}

    return ended


def _spin(ms: int) -> None:
    """Uses the processor and never lets go of the loop."""
    until = time.monotonic() + ms / 1000
    while time.monotonic() < until:
        pass
