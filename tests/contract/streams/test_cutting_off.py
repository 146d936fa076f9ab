"""S-14: settled entries leave the stream, singly or by cutting it off, and nothing else does."""

from __future__ import annotations

import asyncio
import random

import pytest

from tenure.core.job import NewJob
from tenure.core.lease import Lease
from tenure.core.outcome import Completed, Outcome

COUNT = 120


async def filled(bench, count: int = COUNT):
    queue = bench.queue("w1", lease_ms=60_000)
    jobs = [NewJob(task="chat", payload=b"{}", job_id=f"j{number}") for number in range(count)]
    await queue.submit(jobs)
    return queue


async def complete(queue, leases: list[Lease]) -> None:
    for verdict in await queue.settle([Outcome(lease, "complete") for lease in leases]):
        assert isinstance(verdict, Completed)


async def left(bench) -> set[str]:
    entries = await bench.outside.xrange(bench.key("jobs:stream"))
    return {fields["job_id"] for _, fields in entries}


def names(*numbers: int) -> set[str]:
    return {f"j{number}" for number in numbers}


@pytest.mark.clause("S-14")
async def test_what_is_settled_in_order_is_gone_and_what_waits_stays(bench):
    queue = await filled(bench)
    await complete(queue, await queue.claim(50, wait_ms=0))
    assert await left(bench) == names(*range(50, COUNT))
    assert await bench.pending() == 0
    await complete(queue, await queue.claim(COUNT, wait_ms=0))
    assert await left(bench) == set()


@pytest.mark.clause("S-14")
async def test_entries_that_others_still_hold_stay_wherever_they_stand(bench):
    queue = await filled(bench)
    leases = await queue.claim(COUNT, wait_ms=0)
    held = (40, 41, 90)
    await complete(queue, [lease for n, lease in enumerate(leases) if n not in held])
    assert await left(bench) == names(*held)
    assert await bench.pending() == len(held)
    await complete(queue, [leases[number] for number in held])
    assert await left(bench) == set()


@pytest.mark.clause("S-14")
async def test_the_order_in_which_jobs_end_does_not_matter(bench):
    queue = await filled(bench)
    leases = await queue.claim(100, wait_ms=0)
    random.Random(7).shuffle(leases)
    await complete(queue, leases[:60])
    await complete(queue, leases[60:])
    assert await left(bench) == names(*range(100, COUNT))


@pytest.mark.clause("S-14")
async def test_entries_that_a_foreign_group_skipped_are_not_cut_off(bench):
    queue = await filled(bench, 30)
    stream = bench.key("jobs:stream")
    await bench.outside.xgroup_create(stream, "workers", "$")
    jobs = [NewJob(task="chat", payload=b"{}", job_id=f"j{n}") for n in range(30, 90)]
    await queue.submit(jobs)
    leases = await queue.claim(60, wait_ms=0)
    assert len(leases) == 60
    await complete(queue, leases)
    assert await left(bench) == names(*range(30))
    await bench.outside.xgroup_setid(stream, "workers", "0")
    assert len(await queue.claim(60, wait_ms=0)) == 30


@pytest.mark.clause("S-11", "S-14")
async def test_a_group_that_was_lost_meanwhile_loses_nothing_that_it_has_not_handed_out(bench):
    queue = await filled(bench)
    leases = await queue.claim(50, wait_ms=0)
    await bench.outside.xgroup_destroy(bench.key("jobs:stream"), "workers")
    await complete(queue, leases)
    assert await left(bench) == names(*range(50, COUNT))
    assert len(await queue.claim(COUNT, wait_ms=0)) == COUNT - 50


@pytest.mark.clause("S-14")
async def test_a_job_of_an_earlier_life_with_the_same_id_runs_once(bench):
    """Its first entry outlived it; whichever is taken first, the other is found to be over."""
    queue = await filled(bench, 1)
    await bench.outside.delete(bench.key("job:j0"), bench.key("job:j0:events"))
    await queue.submit([NewJob(task="chat", payload=b"{}", job_id="j0")])
    leases = await queue.claim(10, wait_ms=0)
    assert [lease.job_id for lease in leases] == ["j0"]
    await complete(queue, leases)
    other = bench.queue("w2", lease_ms=50)
    async with asyncio.timeout(20):
        while await left(bench):
            assert await other.claim(10, wait_ms=0) == []
            await other.upkeep()
