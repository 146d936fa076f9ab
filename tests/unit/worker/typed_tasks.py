"""Typed handlers that a child process imports."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tenure import Job, task


@dataclass
class Size:
    width: int
    height: int = 1


@dataclass
class Area:
    value: int
    pid: int


@task("area", process=True)
def area(job: Job, size: Size) -> Area:
    job.report(50, data={"attempt": job.attempt})
    return Area(size.width * size.height, os.getpid())


@task("area-async", process=True)
async def area_async(size: Size) -> Area:
    return Area(size.width * size.height, os.getpid())
