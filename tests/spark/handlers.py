"""A task that executors import: it fails once for 5 and for good with 7."""

from __future__ import annotations

from typing import Any

from tenure import Fatal, Job, fixed, task


@task("shout", retry=fixed(1, max_attempts=3))
async def shout(job: Job) -> Any:
    row = job.payload
    if row["id"] == 7:
        raise Fatal("never seven")
    if row["id"] == 5 and job.attempt == 1:
        raise ConnectionError("try again")
    return row["text"].upper()
