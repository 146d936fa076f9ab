"""Handlers that submit jobs and read results, in the loop, in threads and in processes."""

from __future__ import annotations

from typing import Any

import pytest

from tenure import Job, task
from tenure.core.errors import InvalidJob, UsageError
from tenure.testing import FakeJob, run_task, serving
from tests.unit.worker.process_tasks import afan, fan

SOON_S = 20.0


@task("leaf")
async def leaf(n: int) -> int:
    return n


@task("sum")
def total(job: Job) -> Any:
    later = job.submit("leaf", {"n": sum(job.children)}, delay_s=60)
    return {"later": later, "sum": sum(job.children)}


async def test_a_handler_in_a_process_submits_and_reads_results() -> None:
    async with serving(fan, afan, leaf) as queue:
        chain = await queue.client.chain(leaf.call(n=4), fan)
        child, refusal, before = await chain.result(timeout_s=SOON_S)
        assert before == [4]
        assert "max_attempts counts starts" in refusal
        assert await queue.client.handle(child).result(timeout_s=SOON_S) == 1
        chain = await queue.client.chain(leaf.call(n=5), afan)
        assert (await chain.result(timeout_s=SOON_S))[1] == [5]


async def test_a_fake_job_has_children_and_shows_what_was_submitted() -> None:
    job = FakeJob(children=[1, 2])
    assert (await run_task(total, job=job))["sum"] == 3
    assert job.submitted == [("leaf", {"n": 3}, {"delay_s": 60})]


async def test_a_scheduled_job_comes_when_the_clock_says_so() -> None:
    ran: list[str] = []

    @task("report", cron="0 3 * * *")
    async def report(job: Job, days: int = 1) -> int:
        ran.append(job.id)
        return days

    async with serving(report) as queue:
        await queue.worker.watch.until("schedules")
        (schedule,) = await queue.client.schedules()
        queue.clock.advance((schedule.next_ms - queue.clock()) / 1000 + 1)
        handle = queue.client.handle(f"report@{schedule.next_ms}")
        await queue.worker.watch.until("settled", timeout_s=SOON_S)
        assert await handle.result(timeout_s=SOON_S) == 1
        assert ran == [f"report@{schedule.next_ms}"]


def test_a_scheduled_task_needs_no_arguments() -> None:
    @task("report", every_s=60)
    async def report(days: int) -> int:
        return days

    from tenure.worker import Worker

    with pytest.raises(InvalidJob, match="days"):
        Worker([report], queues=["memory://unused"])


def test_a_schedule_that_cannot_work_is_refused_where_it_is_declared() -> None:
    with pytest.raises(UsageError, match="Bad minute"):
        task("report", cron="61 * * * *")
    with pytest.raises(UsageError, match="name of its own"):
        task("*", every_s=60)
