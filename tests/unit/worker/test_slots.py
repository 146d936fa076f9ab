"""Queues share the slots of a worker fairly."""

import asyncio

from tenure.worker import Job, Worker, task
from tenure.worker.claim import QueueSlots, Slots
from tests.unit.worker.seam import Store, serving


def take_now(slots: Slots, queue: QueueSlots, count: int) -> None:
    slots.used += count
    queue.in_use += count


def test_a_lone_queue_takes_half_at_a_time_so_that_claims_overlap() -> None:
    slots = Slots(100, batch_max=500)
    queue = slots.add_queue()
    assert slots.allowance(queue) == 50
    take_now(slots, queue, 50)
    assert slots.allowance(queue) == 50
    take_now(slots, queue, 50)
    assert slots.allowance(queue) == 0


def test_a_single_slot_can_be_taken() -> None:
    slots = Slots(1, batch_max=500)
    assert slots.allowance(slots.add_queue()) == 1


def test_a_claim_asks_for_no_more_than_its_queue_gives_at_once() -> None:
    slots = Slots(200, batch_max=500)
    bounded, wide = slots.add_queue(claim_max=25), slots.add_queue(claim_max=1_000)
    assert slots.allowance(bounded) == 25
    assert slots.allowance(wide) == 100


def test_free_slots_may_be_borrowed_while_nobody_else_is_hungry() -> None:
    slots = Slots(10, batch_max=500)
    busy, quiet = slots.add_queue(), slots.add_queue()
    take_now(slots, busy, 5)
    quiet.idle = True
    assert slots.allowance(busy) == 5


def test_nobody_borrows_what_a_hungry_queue_is_owed() -> None:
    slots = Slots(10, batch_max=500)
    busy, hungry = slots.add_queue(), slots.add_queue()
    take_now(slots, busy, 8)
    hungry.wants_more = True
    assert slots.allowance(busy) == 0
    assert slots.allowance(hungry) == 2


def test_an_idle_queue_waits_with_one_slot_only() -> None:
    slots = Slots(10, batch_max=500)
    idle, _other = slots.add_queue(), slots.add_queue()
    idle.idle = True
    assert slots.allowance(idle) == 1


async def test_a_taker_finds_all_slots_that_were_freed_in_one_turn() -> None:
    slots = Slots(4, batch_max=500)
    queue = slots.add_queue()
    assert await slots.take(queue) == 2
    assert await slots.take(queue) == 2
    taker = asyncio.create_task(slots.take(queue))
    await asyncio.sleep(0)
    slots.give(queue, 1)
    slots.give(queue, 1)
    assert await taker == 2


async def test_closing_wakes_whoever_waits() -> None:
    slots = Slots(1, batch_max=500)
    queue = slots.add_queue()
    await slots.take(queue)
    taker = asyncio.create_task(slots.take(queue))
    await asyncio.sleep(0)
    slots.close()
    assert await taker == 0


async def test_a_busy_queue_does_not_starve_another() -> None:
    flood, trickle = Store(name="flood"), Store(name="trickle")
    flood.add("work", 400)
    trickle.add("work", 20)
    order: list[str] = []

    @task("work")
    async def work(job: Job) -> None:
        order.append(job.queue)
        await asyncio.sleep(0.001)  # the work

    queues = [flood.open, trickle.open]
    await Worker([work], queues=queues, concurrency=4, burst=True).serve()
    assert len(order) == 420
    last = max(index for index, queue in enumerate(order) if queue == "trickle")
    assert last < 120  # about half of the slots were its own until it was empty


async def test_a_job_in_a_quiet_queue_starts_while_its_neighbour_is_flooded() -> None:
    flood, quiet = Store(name="flood"), Store(name="quiet")
    flood.add("work", 100_000)

    @task("work")
    async def work(job: Job) -> None:
        await asyncio.sleep(0.002)  # the work

    worker = Worker([work], queues=[flood.open, quiet.open], concurrency=10)
    async with serving(worker):
        await worker.watch.until("settled", 50)
        quiet.add("work", 3)
        before = worker.watch.counts["settled"]
        while len(quiet.outcomes) < 3:
            assert worker.watch.counts["settled"] - before < 1_000
            await asyncio.sleep(0)


async def test_one_slot_serves_two_queues_in_turn() -> None:
    first, second = Store(name="first"), Store(name="second")
    first.add("work", 5)
    second.add("work", 5)

    @task("work")
    async def work(job: Job) -> None:
        return None

    worker = Worker([work], queues=[first.open, second.open], concurrency=1)
    async with serving(worker):
        await worker.watch.until("settled", 10)
    assert len(first.outcomes) == len(second.outcomes) == 5


async def test_a_queue_with_a_limit_of_its_own_leaves_the_rest_to_others() -> None:
    slots = Slots(20, batch_max=100)
    hours, moments = slots.add_queue(most=5), slots.add_queue(claim_max=10, most=15)
    hours.wants_more = True
    assert await slots.take(hours) == 5
    assert slots.allowance(hours) == 0
    assert await slots.take(moments) == 10
    assert slots.allowance(moments) == 5
    slots.give(hours, 2)
    assert slots.allowance(hours) == 2
