"""A worker without the handler of a job's task hands the job back; another worker loses nothing."""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec
import pytest

from tenure.core.job import JobRecord
from tenure.worker import task
from tenure.worker.job import Job
from tests.contract.adapters import Stage
from tests.contract.suite.acting import claim_one, job, record, settle, submit
from tests.contract.suite.serving import serving, until

pytestmark = pytest.mark.clause("M-16")

JOBS = 12
LIMIT_MS = 400


@task("render")
async def old(job: Job) -> str:
    return "old"


@task("transcribe")
async def new(job: Job) -> int:
    return job.attempt


async def test_a_rolling_deploy_that_adds_a_task_loses_nothing(stage: Stage) -> None:
    """The old worker meets every job first, and runs beside the new one for a while."""

    async def all_done() -> list[JobRecord]:
        found = [await record(stage, each) for each in ids]
        return found if all(each.state == stage.words.done for each in found) else []

    async def some_settled() -> bool:
        return second.watch.counts["settled"] > 0

    async with AsyncExitStack() as fleet:
        jobs = [job(task="transcribe", max_attempts=1) for _ in range(JOBS)]
        ids = await submit(stage.queue("producer"), *jobs)
        first = await fleet.enter_async_context(serving(stage, old))
        await first.watch.until("settled", JOBS, timeout_s=10)
        assert all(each.attempt == 0 for each in [await record(stage, each) for each in ids])
        second = await fleet.enter_async_context(serving(stage, old, new))
        await until(stage, some_settled)
        first.stop()
        ended = await until(stage, all_done)
    assert {msgspec.json.decode(each.result) for each in ended} == {1}
    assert {each.attempt for each in ended} == {1}


async def test_a_job_that_nobody_can_run_fails_at_the_limit_and_names_the_nearest_task(
    stage: Stage,
) -> None:
    async def failed() -> JobRecord | None:
        found = await record(stage, job_id)
        return found if found.state == stage.words.failed else None

    (job_id,) = await submit(stage.queue("producer"), job(task="transcrive", max_attempts=1))
    async with serving(stage, new, unknown_task_ms=LIMIT_MS) as worker:
        ended = await until(stage, failed)
        told = worker.watch.counts["settled"]
    assert b"'transcribe'" in ended.error, ended.error
    assert told >= 4, "it was handed back at least three times before"
    assert ended.updated_ms - ended.created_ms >= LIMIT_MS
    assert not await stage.queue("other").claim(1, wait_ms=20)


async def test_a_job_handed_back_has_spent_no_attempt(stage: Stage) -> None:
    (job_id,) = await submit(stage.queue("producer"), job(task="strange", max_attempts=1))
    async with serving(stage, new) as worker:
        await worker.watch.until("settled", timeout_s=10)
    await stage.advance(1_300)
    queue = stage.queue("able")
    lease = await claim_one(queue)
    assert (lease.job_id, lease.attempt, lease.fence) == (job_id, 1, 2)
    await settle(queue, lease, "complete")


@pytest.mark.needs("ttl_before_start")
async def test_a_job_with_a_time_to_live_fails_with_the_nearest_name_when_that_ends(
    stage: Stage,
) -> None:
    async def failed() -> JobRecord | None:
        found = await record(stage, job_id)
        return found if found.state == stage.words.failed else None

    mistyped = job(task="transcrive", max_attempts=1, ttl_ms=5_000)
    (job_id,) = await submit(stage.queue("producer"), mistyped)
    async with serving(stage, new) as worker:
        ended = await until(stage, failed)
    told = worker.watch.counts["settled"]  # it has stopped, so it knows of every answer
    assert b"'transcribe'" in ended.error, ended.error
    assert told >= 2, "it was handed back before"  # how often: the store promotes once a second
    assert 2_500 <= ended.updated_ms - ended.created_ms <= 5_000
