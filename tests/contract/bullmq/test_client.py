"""The client on BullMQ's own ground: jobs that remove themselves, and unique jobs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tenure import Client, InvalidJob, JobCancelled, JobFailed, Worker, task
from tenure.core.job import NewJob
from tenure.worker import Settings

pytestmark = pytest.mark.clause("B-3")

SOON_S = 10.0


@task("work")
async def work(value: int, fails: bool = False) -> int:
    if fails:
        raise ValueError("no ink")
    return value


async def served(bench: Any) -> tuple[Worker, asyncio.Future[int]]:
    worker = Worker([work], queues=[bench.url()], settings=Settings(concurrency=4))
    return worker, asyncio.ensure_future(worker.serve())


async def test_a_job_that_removes_itself_leaves_its_result_in_its_last_event(bench: Any) -> None:
    async with Client(bench.url()) as client:
        kept = {"removeOnComplete": True, "removeOnFail": True}
        done = await client.submit(work.call(value=7), extra=kept)
        failed = await client.submit(work.call(value=7, fails=True), extra=kept)
        worker, serving = await served(bench)
        assert await done.result(timeout_s=SOON_S) == 7
        with pytest.raises(JobFailed, match="no ink"):
            await failed.result(timeout_s=SOON_S)
        assert await client.get(done.id) is None
        assert await done.result(timeout_s=SOON_S) == 7
        worker.stop()
        await serving


async def test_a_unique_job_is_the_answer_until_it_has_ended(bench: Any) -> None:
    async with Client(bench.url()) as client:
        first = await client.submit(work.call(value=1), unique="report")
        second = await client.submit(work.call(value=2), unique="report")
        assert (second.id, second.replayed) == (first.id, True)
        worker, serving = await served(bench)
        assert await second.result(timeout_s=SOON_S) == 1
        third = await client.submit(work.call(value=3), unique="report")
        assert await third.result(timeout_s=SOON_S) == 3
        worker.stop()
        await serving


async def test_a_group_is_refused_by_the_queue_itself(bench: Any) -> None:
    (answer,) = await bench.queue().submit([NewJob(task="work", payload=b"{}", gid="tenants")])
    assert (answer.status, answer.job_id) == ("invalid", "")
    assert "omniq" in answer.reason
    async with Client(bench.url()) as client:
        with pytest.raises(InvalidJob, match="bullmq has no groups"):
            await client.submit("work", {}, group="tenants")


async def test_a_cancelled_job_is_told_from_one_that_failed(bench: Any) -> None:
    async with Client(bench.url()) as client:
        handle = await client.submit(work, value=1)
        await handle.cancel()
        with pytest.raises(JobCancelled):
            await handle.result(timeout_s=SOON_S)
        assert (await handle.status()).own_state == "failed"
