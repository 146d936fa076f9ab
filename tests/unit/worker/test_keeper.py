"""Leases are kept while handlers run, whatever these do; a lost one stops its handler."""

import asyncio
import threading
import time

from tenure.core.errors import LeaseLost, StoreUnreachable
from tenure.worker import Job, Settings, Worker, task
from tests.unit.worker.seam import Store, serving

LEASE_MS = 400
QUICK = Settings(backoff_ms=1, backoff_ms_max=5)


async def test_a_handler_that_blocks_the_loop_for_three_leases_keeps_its_lease() -> None:
    store = Store(lease_ms=LEASE_MS)
    store.add("block")
    extends: list[int] = []

    @task("block")
    async def block(job: Job) -> None:
        await asyncio.sleep(0)
        before = store.calls["extend"]
        time.sleep(3 * LEASE_MS / 1000)
        extends.append(store.calls["extend"] - before)
        assert not job.cancelled

    worker = Worker([block], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("settled")
    assert extends[0] >= 3
    assert store.kinds() == {"block-1": "complete"}
    assert store.attempts["block-1"] == 1
    assert worker.watch.counts["lost"] == 0


async def test_extends_run_in_their_own_thread_and_claims_do_not() -> None:
    store = Store(lease_ms=LEASE_MS)
    store.add("wait")
    done = asyncio.Event()

    @task("wait")
    async def wait(job: Job) -> None:
        await done.wait()

    worker = Worker([wait], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("extended", 3)
        done.set()
        await worker.watch.until("settled")
    assert store.threads["extend"] == "tenure-keeper"
    assert store.threads["claim"] == threading.current_thread().name
    assert not [t for t in threading.enumerate() if t.name == "tenure-keeper"]


async def test_all_leases_of_a_queue_are_extended_in_one_call() -> None:
    store = Store(lease_ms=LEASE_MS)
    store.add("wait", 30)
    done = asyncio.Event()

    @task("wait")
    async def wait(job: Job) -> None:
        await done.wait()

    worker = Worker([wait], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("extended", 60)
        done.set()
        await worker.watch.until("settled", 30)
    assert {size for name, size in store.batches if name == "extend"} == {30}


async def test_a_short_job_is_never_extended() -> None:
    store = Store(lease_ms=60_000)
    store.add("noop", 100)

    @task("noop")
    async def noop(job: Job) -> None:
        return None

    await Worker([noop], queues=[store.open], burst=True).serve()
    assert store.calls["extend"] == 0


async def test_a_stolen_lease_cancels_the_handler_and_nothing_is_written() -> None:
    store = Store(lease_ms=LEASE_MS)
    store.add("wait")
    seen: list[bool] = []

    @task("wait")
    async def wait(job: Job) -> None:
        try:
            await asyncio.sleep(60)  # only a cancel ends it
        finally:
            seen.append(job.cancelled)

    worker = Worker([wait], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("extended")
        store.stolen.add("wait-1")
        await worker.watch.until("lost")
        assert worker.health().slots_used <= 100
    assert seen == [True]
    assert store.outcomes == {}
    assert store.calls["settle"] == 0


async def test_a_lease_is_lost_when_its_local_deadline_passes_unconfirmed() -> None:
    """The store is away: nobody can tell us, so our own clock does."""
    store = Store(lease_ms=LEASE_MS)
    store.before["extend"] = lambda _: StoreUnreachable("away")
    store.add("wait")
    began, lost = [], []

    @task("wait")
    async def wait(job: Job) -> None:
        began.append(time.monotonic())
        try:
            await asyncio.sleep(60)  # only a cancel ends it
        finally:
            lost.append(time.monotonic())

    worker = Worker([wait], queues=[store.open], settings=QUICK)
    async with serving(worker):
        await worker.watch.until("lost")
    assert store.calls["settle"] == 0
    assert worker.watch.counts["extend_failed"] >= 1
    assert lost[0] - began[0] < 4 * LEASE_MS / 1000


async def test_a_lease_that_alone_could_not_be_reached_is_lost_and_the_others_are_kept() -> None:
    """The queue returns such a lease as it got it; its deadline must not move."""
    store = Store(lease_ms=LEASE_MS)
    store.add("wait", 2)
    store.unreached.add("wait-1")
    lost: list[str] = []

    @task("wait")
    async def wait(job: Job) -> None:
        try:
            await asyncio.sleep(60)  # only a cancel ends it
        finally:
            lost.append(job.id)

    worker = Worker([wait], queues=[store.open], settings=QUICK)
    async with serving(worker):
        await worker.watch.until("lost")
        assert lost == ["wait-1"]
        await worker.watch.until("extended", 8)
        assert lost == ["wait-1"]
        assert worker.watch.counts["lost"] == 1


async def test_a_hanging_extend_does_not_hide_that_the_deadline_passed() -> None:
    store = Store(lease_ms=LEASE_MS)
    store.gates["extend"] = asyncio.Event()  # never set
    store.add("wait")

    @task("wait")
    async def wait(job: Job) -> None:
        await asyncio.sleep(60)  # only a cancel ends it

    worker = Worker([wait], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("lost")
    assert store.outcomes == {}


async def test_a_cancel_request_stops_the_handler_and_settles_as_cancelled() -> None:
    store = Store(lease_ms=LEASE_MS)
    store.add("wait")

    @task("wait")
    async def wait(job: Job) -> str:
        try:
            await asyncio.sleep(60)  # only a cancel ends it
        except asyncio.CancelledError:
            assert job.cancelled
        return "a value that no longer counts"

    worker = Worker([wait], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("extended")
        store.cancels.add("wait-1")
        await worker.watch.until("settled")
    assert store.kinds() == {"wait-1": "cancel"}


async def test_a_report_that_meets_a_lost_lease_stops_the_handler() -> None:
    store = Store()
    store.add("talk")
    met: list[LeaseLost] = []

    @task("talk")
    async def talk(job: Job) -> None:
        store.stolen.add(job.id)
        try:
            await job.report(1)
        except LeaseLost as lost:
            met.append(lost)
            raise

    worker = Worker([talk], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("lost")
    assert [lost.job_id for lost in met] == ["talk-1"]
    assert store.calls["settle"] == 0


async def test_in_the_loop_the_keeper_needs_no_thread() -> None:
    store = Store(lease_ms=LEASE_MS)
    store.add("wait")
    before = set(threading.enumerate())
    done = asyncio.Event()

    @task("wait")
    async def wait(job: Job) -> None:
        await done.wait()

    worker = Worker([wait], queues=[store.open], settings=Settings(keeper_threaded=False))
    async with serving(worker):
        await worker.watch.until("extended", 6)
        # Threads of earlier tests may end meanwhile; none may begin.
        assert not set(threading.enumerate()) - before
        done.set()
        await worker.watch.until("settled")
    assert store.threads["extend"] == store.threads["claim"]
