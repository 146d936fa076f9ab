"""What tests of an application have: one task by itself, and a queue in memory with a worker."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tenure import Job, JobFailed, Retry, task
from tenure.core.outcome import Fatal
from tenure.testing import FakeJob, run_task, serving


@dataclass
class Greeting:
    text: str


@task("greet")
async def greet(job: Job, name: str) -> Greeting:
    await job.report(50, "thinking", data={"of": name})
    return Greeting(f"Hello, {name} ({job.attempt})")


@task("plain")
def plain(job):  # type: ignore[no-untyped-def]
    job.report(1)
    return {"got": job.payload, "cancelled": job.cancelled}


@task("flaky")
async def flaky(job: Job, times: int) -> int:
    if job.attempt <= times:
        raise Retry(after=3600)
    return job.attempt


async def test_a_task_runs_by_itself_with_types_and_reports() -> None:
    job = FakeJob(attempt=2)
    assert await run_task(greet, job=job, name="Ada") == Greeting("Hello, Ada (2)")
    assert job.reports == [("progress", "thinking", 50, {"of": "Ada"})]


async def test_a_handler_that_takes_the_job_runs_too() -> None:
    job = FakeJob()
    job.cancel()
    assert await run_task(plain, job=job, a=1) == {"got": {"a": 1}, "cancelled": True}


async def test_a_payload_that_does_not_fit_is_fatal() -> None:
    with pytest.raises(Fatal, match="name: expected `str`"):
        await run_task(greet, name=3)


async def test_client_and_worker_over_a_queue_in_memory() -> None:
    async with serving(greet) as queue:
        handle = await queue.client.submit(greet, name="Ada")
        assert (await handle.result(timeout_s=5)).text == "Hello, Ada (1)"


async def test_two_queues_share_nothing() -> None:
    async with serving(greet) as one, serving(greet) as other:
        handle = await one.client.submit(greet, name="Ada")
        await handle.result(timeout_s=5)
        assert await other.client.get(handle.id) is None


async def test_time_passes_when_it_is_told_to() -> None:
    async with serving(flaky, greet) as queue:
        later = await queue.client.submit(greet.call(name="Ada"), delay_s=86_400)
        flaked = await queue.client.submit(flaky.call(times=2), attempts=5)
        assert (await later.status()).state == "scheduled"
        with pytest.raises(TimeoutError):
            await later.result(timeout_s=0.1)
        queue.clock.advance(86_400)
        assert (await later.result(timeout_s=5)).text == "Hello, Ada (1)"
        for _ in range(20):
            queue.clock.advance(3_600)
            try:
                assert await flaked.result(timeout_s=0.2) == 3
                return
            except TimeoutError:
                continue
        raise AssertionError("it did not become due")


async def test_options_are_those_of_the_queue() -> None:
    async with serving(flaky, max_attempts=1) as queue:
        handle = await queue.client.submit(flaky, times=1)
        with pytest.raises(JobFailed):
            await handle.result(timeout_s=5)
