"""A job that was lost before is taken alone, so that one which kills its workers kills no other."""

import asyncio

import pytest

from leasehold.core.outcome import Outcome
from tests.contract.bullmq.conftest import Bench

pytestmark = pytest.mark.clause("B-54")


async def lost(bench: Bench, job_id: str) -> None:
    """The lease of a running job runs out, and another worker's upkeep takes the job back."""
    bench.raw.delete(bench.key(f"{job_id}:lock"))
    assert (await bench.queue("upkeep", stalled_max=2).upkeep()).reclaimed == 1


@pytest.mark.parametrize("priority", [0, 3])
async def test_a_job_that_was_lost_is_claimed_alone_and_its_neighbours_keep_their_order(
    bench: Bench, priority: int
) -> None:
    first, *others = await bench.producer().add_bulk(
        [("work", {}, {"priority": priority}) for _ in range(4)]
    )
    await bench.queue("dies").claim(1, wait_ms=0)
    await lost(bench, first)
    one, two = bench.queue("one"), bench.queue("two")
    assert [lease.job_id for lease in await one.claim(10, wait_ms=0)] == [first]
    assert [lease.job_id for lease in await two.claim(10, wait_ms=0)] == others


async def test_a_suspect_behind_others_waits_for_a_claim_of_its_own(bench: Bench) -> None:
    producer = bench.producer()
    suspect = await producer.add("work", {})
    await bench.queue("dies").claim(1, wait_ms=0)
    await lost(bench, suspect)
    ahead = await producer.add("work", {}, lifo=True)
    behind = await producer.add("work", {})
    one, two, three = (bench.queue(name) for name in ("one", "two", "three"))
    taken = [[lease.job_id for lease in await q.claim(10, wait_ms=0)] for q in (one, two, three)]
    assert taken == [[ahead], [suspect], [behind]]


async def test_its_worker_takes_nothing_more_until_it_has_ended(bench: Bench) -> None:
    suspect = await bench.producer().add("work", {})
    await bench.queue("dies").claim(1, wait_ms=0)
    await lost(bench, suspect)
    queue = bench.queue("holds")
    (lease,) = await queue.claim(10, wait_ms=0)
    other = await bench.producer().add("work", {})
    assert await queue.claim(10, wait_ms=50) == []
    claiming = asyncio.create_task(queue.claim(10, wait_ms=10_000))
    await asyncio.sleep(0)  # it waits
    await queue.settle([Outcome(lease, "complete", result=b"1")])
    assert [lease.job_id for lease in await asyncio.wait_for(claiming, 5)] == [other]


async def test_a_suspect_that_was_lost_again_holds_its_worker_back_no_longer(bench: Bench) -> None:
    suspect = await bench.producer().add("work", {})
    await bench.queue("dies").claim(1, wait_ms=0)
    await lost(bench, suspect)
    queue = bench.queue("slow")
    assert len(await queue.claim(10, wait_ms=0)) == 1
    await lost(bench, suspect)
    assert [lease.job_id for lease in await queue.claim(10, wait_ms=0)] == [suspect]


async def test_with_lives_to_spare_a_lost_job_is_no_suspect_yet(bench: Bench) -> None:
    ids = await bench.producer().add_bulk([("work", {}, {}) for _ in range(3)])
    await bench.queue("dies").claim(1, wait_ms=0)
    await lost(bench, ids[0])
    queue = bench.queue("calm", stalled_max=5)
    assert [lease.job_id for lease in await queue.claim(10, wait_ms=0)] == ids
