"""Claims follow free slots, overlap with execution, and survive a store that goes away."""

import asyncio
import time

from tenure.core.errors import ReplyLost, StoreUnreachable
from tenure.core.lease import Lease
from tenure.core.seam import QueueFeatures
from tenure.worker import Job, Settings, Worker, task
from tests.unit.worker.seam import Store, View, serving


@task("noop")
async def noop(job: Job) -> None:
    return None


async def test_every_waiting_job_runs_once_and_is_settled() -> None:
    store = Store()
    ids = store.add("noop", 500)
    worker = Worker([noop], queues=[store.open], burst=True)
    assert await worker.serve() == 0
    assert store.kinds() == dict.fromkeys(ids, "complete")
    assert set(store.attempts.values()) == {1}


async def test_no_more_jobs_run_at_once_than_there_are_slots() -> None:
    store = Store()
    store.add("wait", 20)
    gate, running, most = asyncio.Event(), 0, 0

    @task("wait")
    async def wait(job: Job) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1

    worker = Worker([wait], queues=[store.open], concurrency=4)
    async with serving(worker):
        await worker.watch.until("started", 4)
        gate.set()
        await worker.watch.until("settled", 20)
    assert most == 4


async def test_a_slot_that_frees_is_used_while_its_neighbours_still_run() -> None:
    store = Store()
    store.add("slow")
    store.add("noop", 10)
    gate = asyncio.Event()

    @task("slow")
    async def slow(job: Job) -> None:
        await gate.wait()

    worker = Worker([slow, noop], queues=[store.open], concurrency=2)
    async with serving(worker):
        await worker.watch.until("settled", 10)
        assert "slow-1" not in store.outcomes
        gate.set()
        await worker.watch.until("settled", 11)


async def test_the_next_claim_leaves_before_the_handlers_of_the_last_one_run() -> None:
    """Claim and execution overlap: otherwise the store idles while handlers run, and vice versa."""
    store = Store()
    store.add("noop", 8)
    order: list[str] = []

    class Noting(View):
        async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
            order.append("claim")
            return await super().claim(limit, wait_ms=wait_ms)

    @task("noop")
    async def noting(job: Job) -> None:
        order.append("run")

    worker = Worker([noting], queues=[lambda: Noting(store)], concurrency=4)
    async with serving(worker):
        await worker.watch.until("settled", 8)
    calm = order[order.index("run") + 2 :]  # the first two have shown that they do not block
    assert calm[:4] == ["claim", "claim", "run", "run"]


async def test_where_nothing_more_waits_a_handler_starts_before_the_next_claim_leaves() -> None:
    """A claim that came back with less than it asked for is in no hurry to be followed."""
    store = Store()
    order: list[str] = []

    class Noting(View):
        async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
            order.append("claim")
            leases = await super().claim(limit, wait_ms=wait_ms)
            order.extend(["claimed"] if leases else [])
            return leases

    @task("noop")
    async def noting(job: Job) -> None:
        order.append("run")

    worker = Worker([noting], queues=[lambda: Noting(store)], concurrency=8)
    async with serving(worker):
        for settled in (1, 2, 3):
            store.add("noop")
            await worker.watch.until("settled", settled)
    starts = [place for place, what in enumerate(order) if what == "run"]
    assert [order[place - 1] for place in starts] == ["claimed"] * 3


async def test_no_claim_is_under_way_while_handlers_block_the_loop() -> None:
    """Leases that a claim takes meanwhile would run out before anybody hears of them."""
    store = Store()
    store.add("block", 4)
    under_way = 0
    seen: list[int] = []

    class Noting(View):
        async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
            nonlocal under_way
            under_way += 1
            try:
                await asyncio.sleep(0)
                return await super().claim(limit, wait_ms=wait_ms)
            finally:
                under_way -= 1

    @task("block")
    async def block(job: Job) -> None:
        seen.append(under_way)
        time.sleep(0.06)  # it blocks on purpose

    worker = Worker([block], queues=[lambda: Noting(store)], concurrency=2)
    async with serving(worker):
        await worker.watch.until("settled", 4)
    assert seen == [0, 0, 0, 0]


async def test_nothing_is_claimed_while_outcomes_cannot_be_settled() -> None:
    """What is done but unsettled would run twice after a crash; it must not grow meanwhile."""
    store = Store()
    store.add("noop", 50)
    away = True
    store.before["settle"] = lambda _: StoreUnreachable("away") if away else None
    settings = Settings(backoff_ms=1, backoff_ms_max=5)
    worker = Worker([noop], queues=[store.open], concurrency=4, settings=settings)
    async with serving(worker):
        await worker.watch.until("settle_failed", 20)
        claimed = worker.watch.counts["claimed"]
        await worker.watch.until("settle_failed", 40)
        assert worker.watch.counts["claimed"] == claimed <= 12
        away = False
        await worker.watch.until("settled", 50)


async def test_a_worker_survives_a_store_that_goes_away_and_comes_back() -> None:
    store = Store()
    away = True
    store.before["claim"] = lambda _: StoreUnreachable("away") if away else None
    worker = Worker([noop], queues=[store.open], settings=Settings(backoff_ms=1, backoff_ms_max=5))
    async with serving(worker):
        await worker.watch.until("claim_failed", 5)
        assert worker.health().stores == {"open": False}
        away = False
        store.add("noop", 3)
        await worker.watch.until("settled", 3)
        assert worker.health().stores == {"open": True}


async def test_a_claim_whose_reply_was_lost_frees_its_slots() -> None:
    """The leases of the lost reply are the queue's to give again; the slots must not leak."""
    store = Store()
    struck = 0

    def strike(_: object) -> ReplyLost | None:
        nonlocal struck
        struck += 1
        return ReplyLost("gone") if struck <= 3 else None

    store.before["claim"] = strike
    store.add("noop", 2)
    settings = Settings(backoff_ms=1, backoff_ms_max=2, concurrency=1)
    worker = Worker([noop], queues=[store.open], settings=settings)
    async with serving(worker):
        await worker.watch.until("settled", 2)
    assert struck > 3


async def test_an_empty_store_that_answers_at_once_does_not_make_the_worker_spin() -> None:
    class Hasty(View):
        async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
            self.store.calls["claim"] += 1
            return []

    store = Store()
    worker = Worker([noop], queues=[lambda: Hasty(store)])
    async with serving(worker):
        await worker.watch.until("ready")
        before = store.calls["claim"]
        await asyncio.sleep(0.2)  # a window in which to count calls
        assert store.calls["claim"] - before <= 8


async def test_a_claim_never_waits_so_long_that_its_lease_would_be_half_gone() -> None:
    """The local deadline counts from when the claim was sent."""
    waits: list[int] = []

    class Noting(View):
        async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
            waits.append(wait_ms)
            return await super().claim(limit, wait_ms=wait_ms)

    store = Store(lease_ms=300)
    store.add("noop")
    worker = Worker([noop], queues=[lambda: Noting(store)])
    async with serving(worker):
        await worker.watch.until("settled")
        store.add("noop")
        await worker.watch.until("settled", 2)
    assert max(waits) <= 100


async def test_a_queue_that_gives_few_at_once_is_still_known_to_have_more() -> None:
    """Else the next claim would leave only after the handlers of this one had their turn."""
    store = Store()
    store.add("noop", 40)
    asked: list[int] = []
    hungry: list[bool] = []

    class Bounded(View):
        features = QueueFeatures(claim_max=5)

        async def claim(self, limit: int, *, wait_ms: int) -> list[Lease]:
            asked.append(limit)
            hungry.append(worker._services[0].source.queue_slots.wants_more)
            return await super().claim(min(limit, 5), wait_ms=wait_ms)

    worker = Worker([noop], queues=[lambda: Bounded(store)], concurrency=100, burst=True)
    assert await worker.serve() == 0
    assert len(store.kinds()) == 40
    assert max(asked) == 5
    assert hungry[1:9] == [True] * 8
