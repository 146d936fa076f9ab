"""Handlers that run in child processes must be importable: here they are."""

import asyncio
import logging
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tenure.core.errors import InvalidJob
from tenure.core.outcome import Retry, Snooze
from tenure.worker import Job, task


@task("pid", process=True)
def pid(job: Job) -> dict[str, Any]:
    job.report(50, "half way", data={"from": "child"})
    return {"pid": os.getpid(), "payload": job.payload, "attempt": job.attempt}


@task("apid", process=True)
async def apid(job: Job) -> int:
    await job.report(10)
    await asyncio.sleep(0)
    return os.getpid()


@task("hang", process=True, timeout_s=0.3)
def hang(job: Job) -> None:
    """Deaf to signals, with a child of its own: only a kill of the whole session helps."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "60"])
    job.report(1, "hanging", data={"pids": [os.getpid(), child.pid]})
    time.sleep(60)  # only a kill ends it


@task("forever", process=True)
def forever(job: Job) -> None:
    job.report(1, "hanging", data={"pids": [os.getpid()]})
    time.sleep(60)  # only a kill ends it


@task("die", process=True)
def die(job: Job) -> None:
    os._exit(9)


@task("raise", process=True)
def raising(job: Job) -> None:
    raise Retry(1.5, "not yet")


@task("snooze", process=True)
def snoozing(job: Job) -> None:
    raise Snooze(60)


@task("odd", process=True)
def odd(job: Job) -> object:
    return object()


@task("half", process=True)
def half(job: Job) -> str:
    """Returns half a surrogate pair on its first attempt, raises one on its second."""
    job.report(step="step \ud83d", data={"at": "\ud83d"})
    if job.payload:
        raise ValueError("broken \ud83d")
    return "a\ud83db"


@task("broken", process=True)
def broken(job: Job) -> float:
    return 1 / 0


@task("talking", process=True)
def talking(job: Job) -> None:
    logging.getLogger("app").info("in the child")


@asynccontextmanager
async def lifespan() -> AsyncIterator[dict[str, Any]]:
    """Writes down when it is entered and left, in the folder that the environment names."""
    notes = Path(os.environ["TENURE_TEST_NOTES"], f"{os.getpid()}.txt")
    notes.write_text("entered\n")
    yield {"pid": os.getpid(), "loop": asyncio.get_running_loop(), "uses": []}
    notes.write_text(notes.read_text() + "left\n")


@task("uses", process=True)
def uses(job: Job) -> list[int]:
    job.state["uses"].append(job.attempt)
    return [job.state["pid"], len(job.state["uses"])]


@task("uses_async", process=True)
async def uses_async(job: Job) -> list[int]:
    job.state["uses"].append(job.attempt)
    assert job.state["loop"] is asyncio.get_running_loop()
    return [job.state["pid"], len(job.state["uses"])]


@task("fan", process=True)
def fan(job: Job) -> list[Any]:
    """Submits a job from a child process, and what a queue refuses; then its children's results."""
    child: str = job.submit("leaf", {"n": 1})
    try:
        job.submit("leaf", {"n": 2}, attempts=0)
    except InvalidJob as error:
        return [child, str(error), list(job.children)]
    return []


@task("afan", process=True)
async def afan(job: Job) -> list[Any]:
    return [await job.submit("leaf", {"n": 1}), list(await job.children)]
