"""Typed handlers in the loop, in threads and in processes, by a real worker."""

from __future__ import annotations

import os
import threading

import pytest

from tenure import Job, JobFailed, task
from tenure.testing import serving
from tests.unit.worker import typed_tasks as child

SOON_S = 20.0


@task("in-loop")
async def in_loop(job: Job, number: int) -> str:
    return f"{number} {threading.current_thread() is threading.main_thread()} {job.attempt}"


@task("in-thread")
def in_thread(number: int, job: Job) -> str:
    return f"{number} {threading.current_thread() is threading.main_thread()} {job.attempt}"


@task("nothing")
async def nothing() -> None: ...


async def test_every_kind_of_handler_gets_its_parameters() -> None:
    async with serving(in_loop, in_thread, nothing, child.area, child.area_async) as queue:
        client = queue.client
        assert await (await client.submit(in_loop, number=7)).result(timeout_s=SOON_S) == "7 True 1"
        threaded = await client.submit("in-thread", {"number": 7})
        assert await threaded.result(timeout_s=SOON_S) == "7 False 1"
        assert await (await client.submit(nothing)).result(timeout_s=SOON_S) is None
        assert await (await client.submit("nothing")).result(timeout_s=SOON_S) is None
        for handler in (child.area, child.area_async):
            done = await (await client.submit(handler, size=child.Size(3, 4))).result(
                timeout_s=SOON_S
            )
            assert done.value == 12
            assert done.pid != os.getpid()


@pytest.mark.parametrize("name", ["in-loop", "in-thread", "area"])
async def test_a_payload_that_does_not_fit_is_never_tried_again(name: str) -> None:
    async with serving(in_loop, in_thread, child.area, max_attempts=3) as queue:
        handle = await queue.client.submit(name, {"number": "x", "size": 3})
        with pytest.raises(JobFailed, match=r"no such field|expected") as failed:
            await handle.result(timeout_s=SOON_S)
        assert (failed.value.error_code, failed.value.attempts) == ("invalid_payload", 1)
