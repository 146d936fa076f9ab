"""Burst mode: run what there is, then stop."""

import asyncio

from structlog.testing import capture_logs

from tenure.core.errors import ServerError, StoreUnreachable
from tenure.core.job import NewJob
from tenure.core.seam import Upkeep
from tenure.worker import Job, Settings, Worker, task
from tests.unit.worker.seam import Store, View
from tests.waiting import until


@task("noop")
async def noop(job: Job) -> None:
    return None


async def test_an_empty_queue_ends_a_burst_at_once() -> None:
    worker = Worker([noop], queues=[Store().open], burst=True)
    assert await asyncio.wait_for(worker.serve(), 5) == 0


async def test_jobs_that_jobs_submit_belong_to_the_burst() -> None:
    store = Store()
    store.add("parent", payload=b"3")

    @task("parent")
    async def parent(job: Job) -> None:
        await asyncio.sleep(0.05)  # longer than an empty claim takes
        if job.payload:
            payload = str(job.payload - 1).encode()
            new = NewJob(task="parent", payload=payload, job_id=f"{job.id}+")
            await View(store).submit([new])

    await Worker([parent], queues=[store.open], burst=True).serve()
    assert list(store.outcomes) == ["parent-1", "parent-1+", "parent-1++", "parent-1+++"]


async def test_a_burst_waits_for_all_of_its_queues() -> None:
    stores = [Store(name=f"q{number}") for number in range(3)]
    for number, store in enumerate(stores):
        store.add("noop", 50 * number)
    await Worker([noop], queues=[store.open for store in stores], burst=True).serve()
    assert [len(store.outcomes) for store in stores] == [0, 50, 100]


async def test_what_upkeep_promotes_belongs_to_the_burst() -> None:
    store = Store()

    class Promoting(View):
        async def upkeep(self) -> Upkeep:
            if not store.attempts and not store.waiting:
                store.add("noop")
            return Upkeep(promoted=1)

    await Worker([noop], queues=[lambda: Promoting(store)], burst=True).serve()
    assert store.kinds() == {"noop-1": "complete"}


async def test_upkeep_runs_beside_a_running_handler() -> None:
    from tenure.worker import Settings

    store = Store()
    store.add("wait")

    @task("wait")
    async def wait(job: Job) -> None:
        before = store.calls["upkeep"]
        await until(lambda: store.calls["upkeep"] >= before + 3, "upkeep ran thrice")

    settings = Settings(upkeep_ms=5)
    worker = Worker([wait], queues=[store.open], settings=settings, burst=True)
    await asyncio.wait_for(worker.serve(), 10)
    assert store.kinds() == {"wait-1": "complete"}


async def test_a_burst_ends_with_an_error_when_the_store_refuses_every_claim() -> None:
    store = Store()
    store.before["claim"] = lambda _: ServerError("answered /claim with 401: a key is needed")
    settings = Settings(backoff_ms=1, backoff_ms_max=2)
    with capture_logs() as lines:
        worker = Worker([noop], queues=[store.open], burst=True, settings=settings)
        assert await asyncio.wait_for(worker.serve(), 5) == 1
    assert store.calls["claim"] == 3
    (line,) = [line for line in lines if line["log_level"] == "error"]
    assert "a key is needed" in line["error"]
    assert "exc_info" not in line


async def test_a_burst_waits_for_a_store_that_is_away() -> None:
    store = Store()
    left = iter(range(5))
    gone = StoreUnreachable("away")
    store.before["claim"] = lambda _: gone if next(left, None) is not None else None
    store.add("noop")
    settings = Settings(backoff_ms=1, backoff_ms_max=2)
    worker = Worker([noop], queues=[store.open], burst=True, settings=settings)
    assert await asyncio.wait_for(worker.serve(), 5) == 0
    assert store.kinds() == {"noop-1": "complete"}
