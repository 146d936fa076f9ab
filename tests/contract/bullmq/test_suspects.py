"""A job that lost its worker twice may be what kills it: a worker runs one such suspect at a time,
and goes on with other jobs in its other slots."""

import asyncio
from typing import Any

import pytest

from tenure import Worker, task
from tenure.core.outcome import Outcome
from tenure.worker.config import Settings
from tests.contract.bullmq.conftest import Bench
from tests.waiting import until

pytestmark = pytest.mark.clause("B-54")
OFTEN = 5  # how often a lease may run out in these tests


async def lost(bench: Bench, *job_ids: str) -> None:
    """The leases of running jobs run out, and another worker's upkeep takes the jobs back."""
    for job_id in job_ids:
        bench.raw.delete(bench.key(f"{job_id}:lock"))
    assert (await bench.queue("upkeep", stalled_max=OFTEN).upkeep()).reclaimed == len(job_ids)


async def lost_twice(bench: Bench, count: int = 1) -> list[str]:
    """Jobs that lost their worker twice and wait again, in their order."""
    ids = await bench.producer().add_bulk([("work", {}, {}) for _ in range(count)])
    for _ in range(2):
        assert len(await bench.queue("dies", stalled_max=OFTEN).claim(count, wait_ms=0)) == count
        await lost(bench, *ids)
    return ids


async def taken(bench: Bench, name: str, limit: int = 10) -> list[str]:
    queue = bench.queue(name, stalled_max=OFTEN)
    return [lease.job_id for lease in await queue.claim(limit, wait_ms=0)]


async def test_a_job_that_lost_its_worker_once_is_claimed_with_its_neighbours(bench: Bench) -> None:
    first, *others = await bench.producer().add_bulk([("work", {}, {}) for _ in range(4)])
    await bench.queue("dies").claim(1, wait_ms=0)
    await lost(bench, first)
    queue = bench.queue("one")
    assert [lease.job_id for lease in await queue.claim(10, wait_ms=0)] == [first, *others]


async def test_a_worker_takes_one_suspect_and_goes_on_with_other_jobs(bench: Bench) -> None:
    suspects = await lost_twice(bench, 3)
    others = await bench.producer().add_bulk([("work", {}, {}) for _ in range(3)])
    assert await taken(bench, "one") == [suspects[0], *others]
    assert bench.ids("wait") == [suspects[2], suspects[1]], "the others keep their places"
    assert await taken(bench, "two") == [suspects[1]]


async def test_suspects_among_priorities_keep_their_places_too(bench: Bench) -> None:
    suspects = await lost_twice(bench, 2)
    await bench.ledger().change_priority(suspects, 3)
    other = await bench.producer().add("work", {}, priority=5)
    assert await taken(bench, "one") == [suspects[0], other]
    assert await taken(bench, "two") == [suspects[1]]


async def test_while_a_suspect_runs_its_worker_takes_other_jobs_and_no_second_suspect(
    bench: Bench,
) -> None:
    first, second = await lost_twice(bench, 2)
    queue = bench.queue("holds", stalled_max=OFTEN)
    (lease,) = await queue.claim(1, wait_ms=0)
    other = await bench.producer().add("work", {})
    assert [each.job_id for each in await queue.claim(10, wait_ms=0)] == [other]
    assert await queue.claim(10, wait_ms=50) == []
    claiming = asyncio.create_task(queue.claim(10, wait_ms=10_000))
    late = await bench.producer().add("work", {})
    assert [each.job_id for each in await asyncio.wait_for(claiming, 5)] == [late]
    claiming = asyncio.create_task(queue.claim(10, wait_ms=10_000))
    await asyncio.sleep(0)  # it waits
    await queue.settle([Outcome(lease, "complete", result=b"1")])
    assert [each.job_id for each in await asyncio.wait_for(claiming, 5)] == [second]
    assert lease.job_id == first


async def test_a_suspect_that_was_lost_again_holds_no_other_suspect_back(bench: Bench) -> None:
    first, second = await lost_twice(bench, 2)
    queue = bench.queue("slow", stalled_max=OFTEN)
    assert [each.job_id for each in await queue.claim(1, wait_ms=0)] == [first]
    await lost(bench, first)
    assert [each.job_id for each in await queue.claim(1, wait_ms=5_000)] == [first]
    assert await taken(bench, "other") == [second]


async def test_many_suspects_do_not_stand_before_other_jobs(bench: Bench) -> None:
    suspects = await lost_twice(bench, 130)
    queue = bench.queue("busy", stalled_max=OFTEN)
    assert len(await queue.claim(1, wait_ms=0)) == 1
    other = await bench.producer().add("work", {})
    found: list[str] = []
    for _ in range(4):  # each claim looks past some of them
        found += [each.job_id for each in await queue.claim(50, wait_ms=0)]
    assert found == [other]
    assert sorted(bench.ids("wait")) == sorted(suspects[1:])


@pytest.mark.parametrize("losses", [1, 2])
async def test_a_slow_job_that_was_lost_holds_no_quick_ones_back(bench: Bench, losses: int) -> None:
    let_go = asyncio.Event()

    @task("*")
    async def handler(job: Any) -> None:
        if job.payload.get("slow"):
            await let_go.wait()

    slow = await bench.producer().add("work", {"slow": True})
    bench.raw.hset(bench.key(slow), "stc", losses)
    url = bench.url(stalled_max=OFTEN)
    worker = Worker([handler], queues=[url], settings=Settings(concurrency=5))
    serving = asyncio.create_task(worker.serve())
    try:
        await until(lambda: bench.ids("active") == [slow], "it runs")
        await bench.producer().add_bulk([("work", {}, {}) for _ in range(20)])
        await until(lambda: bench.raw.zcard(bench.key("completed")) == 20, "the quick ones ran")
        assert bench.ids("active") == [slow]
    finally:
        let_go.set()
        worker.stop()
        await asyncio.wait_for(serving, 15)
