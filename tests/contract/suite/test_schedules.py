"""Schedules over every contract: stored, changed, removed, and each time makes one job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import pytest

from tenure import Client, InvalidJob, Job, task
from tenure.core.errors import ReplyLost, UsageError
from tenure.core.job import NewJob, Schedule, Submitted
from tenure.core.registry import open_queue
from tenure.core.seam import Query, Queue, Schedules
from tenure.plans.schedule import new_schedule, occurrence_id
from tenure.worker import Worker
from tenure.worker.config import Settings
from tests.contract.adapters import Stage, served_url
from tests.contract.suite.serving import until

pytestmark = pytest.mark.clause("M-24", "I-75")

JOB = NewJob(task="tick", payload=b'{"n":1}')


def contract_of(stage: Stage) -> str:
    return served_url(stage).partition("://")[0].partition("+")[0]


@asynccontextmanager
async def queue_of(stage: Stage) -> AsyncGenerator[tuple[Queue, Schedules]]:
    """Another instance of the queue, where its jobs lie, and its schedules."""
    queue = open_queue(served_url(stage), worker_id="scheduler")
    assert queue.features.schedules is not None
    try:
        yield queue, queue.features.schedules
    finally:
        await queue.close()


async def ticks(stage: Stage) -> list[str]:
    page = await stage.ledger.find(Query(task="tick", limit=500))
    return sorted(job.job_id for job in page.jobs)


def own(stage: Stage) -> bool:
    """Whether the contract has schedulers of its own, which need no worker of ours."""
    return contract_of(stage) == "bullmq"


async def test_a_schedule_is_stored_listed_and_removed(stage: Stage) -> None:
    async with Client(served_url(stage)) as client:
        assert await client.schedules() == []
        made = await client.schedule(
            "tick", {"n": 1}, cron="0 3 * * *", tz="Europe/Berlin", name="nightly", attempts=2
        )
        await client.schedule("tick", {"n": 2}, every_s=3_600, name="hourly")
        hourly, nightly = await client.schedules()
        assert nightly == made
        assert (nightly.name, nightly.task, nightly.payload) == ("nightly", "tick", {"n": 1})
        assert (nightly.cron, nightly.tz, nightly.every_s) == ("0 3 * * *", "Europe/Berlin", None)
        assert (hourly.every_s, hourly.payload, hourly.cron) == (3_600, {"n": 2}, "")
        assert hourly.next_ms % 3_600_000 == 0
        assert nightly.next_ms % 3_600_000 == 0
        assert not nightly.declared
        shown = stage.ledger.features.schedules if contract_of(stage) != "plane" else None
        if shown is not None:
            assert [each.name for each in await shown.list()] == ["hourly", "nightly"]
        assert await client.unschedule("nightly")
        assert not await client.unschedule("nightly")
        assert [each.name for each in await client.schedules()] == ["hourly"]


async def test_the_same_schedule_again_changes_nothing_and_another_one_replaces_it(
    stage: Stage,
) -> None:
    async with Client(served_url(stage)) as client:
        first = await client.schedule("tick", {"n": 1}, every_s=3_600)
        assert await client.schedule("tick", {"n": 1}, every_s=3_600) == first
        changed = await client.schedule("tick", {"n": 2}, every_s=7_200)
        assert (changed.payload, changed.every_s) == ({"n": 2}, 7_200)
        assert await client.schedules() == [changed]


async def test_a_schedule_refuses_what_it_cannot_mean(stage: Stage) -> None:
    async with Client(served_url(stage)) as client:
        with pytest.raises(UsageError, match="a schedule has no id"):
            await client.schedule("tick", every_s=60, id="one")
        with pytest.raises(UsageError, match="no time zone"):
            await client.schedule("tick", cron="0 3 * * *", tz="Mars/Base")
        if own(stage):
            with pytest.raises(InvalidJob, match="one job of the times that were missed"):
                await client.schedule("tick", every_s=60, missed="all")
        assert await client.schedules() == []


@pytest.mark.needs("stored_schedules")
async def test_many_workers_at_once_store_each_time_once(stage: Stage) -> None:
    async with queue_of(stage) as (queue, schedules):
        stored = await schedules.put(new_schedule(JOB, every_s=60))
        expected = [
            occurrence_id("tick", stored.next_ms + n * 60_000) for n in range(3)
        ]  # the first is due within a minute
        async with queue_of(stage) as (second, others), queue_of(stage) as (third, more):
            for _ in range(2):
                await asyncio.gather(
                    schedules.enqueue_due(queue.submit, 180_000),
                    others.enqueue_due(second.submit, 180_000),
                    more.enqueue_due(third.submit, 180_000),
                )
        (moved,) = await schedules.list()
    assert set(expected) <= set(found := await ticks(stage))
    assert len(found) == (moved.next_ms - stored.next_ms) // 60_000
    assert moved.last_id == found[-1]


class KilledError(Exception):
    """Stands for the death of a worker."""


@pytest.mark.needs("stored_schedules")
async def test_a_worker_that_dies_between_job_and_record_makes_no_second_job(stage: Stage) -> None:
    async with queue_of(stage) as (queue, schedules):
        stored = await schedules.put(new_schedule(JOB, every_s=3_600))
        ahead_ms = 3_600_000

        async def die(jobs: Sequence[NewJob]) -> list[Submitted]:
            await queue.submit(jobs)
            raise KilledError

        with pytest.raises(KilledError):
            await schedules.enqueue_due(die, ahead_ms)
        assert list(await schedules.list()) == [stored]
        assert await ticks(stage) == [occurrence_id("tick", stored.next_ms)]
        async with queue_of(stage) as (other, others):
            (moved,) = await others.enqueue_due(other.submit, ahead_ms)
            assert await others.enqueue_due(other.submit, 0) == []
    assert not moved.error
    assert moved.last_ms == stored.next_ms
    assert await ticks(stage) == [occurrence_id("tick", stored.next_ms)]


@pytest.mark.needs("stored_schedules")
async def test_a_lost_answer_makes_no_second_job(stage: Stage) -> None:
    queue, lose = await stage.lossy_queue("lossy")
    schedules = queue.features.schedules
    assert schedules is not None
    stored: Schedule = await schedules.put(new_schedule(JOB, every_s=3_600))
    if contract_of(stage) == "plane":  # it stores the jobs itself: an answer to `put` may be lost
        lose()
        with pytest.raises(ReplyLost):
            await schedules.put(new_schedule(JOB, every_s=7_200))
        again = await schedules.put(new_schedule(JOB, every_s=7_200))
        assert await schedules.list() == [again]
        return

    async def lost_submit(jobs: Sequence[NewJob]) -> list[Submitted]:
        lose()
        return list(await queue.submit(jobs))

    async def lost_record(jobs: Sequence[NewJob]) -> list[Submitted]:
        answers = list(await queue.submit(jobs))
        lose()
        return answers

    with pytest.raises(ReplyLost):
        await schedules.enqueue_due(lost_submit, 3_600_000)
    if contract_of(stage) != "memory":  # whose records have no answers to lose
        with pytest.raises(ReplyLost):
            await schedules.enqueue_due(lost_record, 3_600_000)
    await schedules.enqueue_due(queue.submit, 3_600_000)
    assert occurrence_id("tick", stored.next_ms) in (found := await ticks(stage))
    (moved,) = await schedules.list()
    assert len(found) == (moved.next_ms - stored.next_ms) // 3_600_000


async def test_the_jobs_of_a_declared_schedule_run_once_each_at_their_times(stage: Stage) -> None:
    ran: list[str] = []

    @task("tick", every_s=0.3)
    async def tick(job: Job) -> None:
        ran.append(job.id)

    settings = Settings(concurrency=4, upkeep_ms=100)
    workers = [Worker([tick], queues=[served_url(stage)], settings=settings) for _ in range(2)]
    served = [asyncio.ensure_future(worker.serve()) for worker in workers]
    try:

        async def three_times() -> bool:
            return len(ran) >= 3

        await until(stage, three_times)
        async with Client(served_url(stage)) as client:
            (schedule,) = await client.schedules()
            assert (schedule.name, schedule.every_s, schedule.declared) == ("tick", 0.3, True)
            await client.unschedule("tick")
    finally:
        for worker in workers:
            worker.stop()
        await asyncio.gather(*served)
    assert len(set(ran)) == len(ran)
    separator = ":" if own(stage) else "@"
    times = sorted(int(job_id.rpartition(separator)[2]) for job_id in ran)
    assert all(each % 300 == 0 for each in times)


async def test_a_schedule_that_is_declared_no_more_is_removed(stage: Stage) -> None:
    @task("tick", every_s=3_600)
    async def tick(job: Job) -> None: ...

    @task("tick")
    async def unscheduled(job: Job) -> None: ...

    async with Client(served_url(stage)) as client:
        await client.schedule("other", every_s=3_600)
        for tasks, names in (([tick], ["other", "tick"]), ([unscheduled], ["other"])):
            worker = Worker(tasks, queues=[served_url(stage)], settings=Settings(upkeep_ms=50))
            served = asyncio.ensure_future(worker.serve())
            await worker.watch.until("schedules")
            worker.stop()
            await served
            assert sorted(each.name for each in await client.schedules()) == names
