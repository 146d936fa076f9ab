"""What an application hears of its worker, and what it may change while the worker runs."""

import asyncio
from typing import Any

import pytest

from tenure.core.errors import UsageError
from tenure.worker import Job, Settings, Worker, task
from tests.unit.worker.seam import Store
from tests.waiting import until


@task("noop")
async def noop(job: Job) -> str:
    return "done"


@task("bad")
async def bad(job: Job) -> None:
    raise RuntimeError("broken")


async def test_listeners_hear_of_jobs_and_of_the_worker() -> None:
    store, heard = Store(), []
    store.add("noop")
    store.add("bad")
    worker = Worker([noop, bad], queues=[store.open], burst=True)
    worker.on("ready", lambda: heard.append("ready"))
    worker.on("active", lambda job: heard.append(("active", job.id)))
    worker.on("completed", lambda job, result: heard.append(("completed", job.id, result)))
    worker.on("failed", lambda job, failure: heard.append(("failed", job.id, failure.message)))
    worker.on("drained", lambda: heard.append("drained"))

    async def closed() -> None:
        heard.append("closed")

    worker.on("closed", closed)
    await worker.serve()
    await asyncio.sleep(0)  # the last listener is a coroutine
    assert {("active", "noop-1"), ("active", "bad-1")} < set(heard)
    assert ("completed", "noop-1", "done") in heard
    assert ("failed", "bad-1", "broken") in heard
    assert [each for each in heard if isinstance(each, str)] == ["ready", "drained", "closed"]


async def test_a_listener_that_fails_harms_nobody() -> None:
    store, heard = Store(), []
    store.add("noop", 3)

    def broken(job: Job, result: Any) -> None:
        raise ValueError("not today")

    worker = Worker([noop], queues=[store.open], burst=True)
    worker.on("completed", broken)
    worker.on("completed", lambda job, result: heard.append(job.id))
    assert await worker.serve() == 0
    assert len(heard) == 3


def test_an_event_that_no_worker_has_is_an_error() -> None:
    worker = Worker([noop], queues=[Store().open])
    with pytest.raises(UsageError, match="no event 'finished'"):
        worker.on("finished", print)  # type: ignore[arg-type]


async def test_a_paused_worker_claims_nothing_until_it_is_resumed() -> None:
    store, heard = Store(), []
    worker = Worker([noop], queues=[store.open], settings=Settings(claim_wait_ms=20))
    worker.on("paused", lambda: heard.append("paused"))
    worker.on("resumed", lambda: heard.append("resumed"))
    serving = asyncio.create_task(worker.serve())
    store.add("noop")
    await until(lambda: len(store.outcomes) == 1)
    worker.pause()
    await until(lambda: worker._slots.used == 0)  # the claim under way has come back
    store.add("noop", 5)
    await asyncio.sleep(0.2)  # ten claims' time in which nothing may happen
    assert sum(kind == "complete" for kind in store.kinds().values()) == 1
    await asyncio.to_thread(worker.resume)
    await until(lambda: sum(kind == "complete" for kind in store.kinds().values()) == 6)
    worker.stop()
    await serving
    assert heard == ["paused", "resumed"]


async def test_a_worker_that_is_paused_still_stops() -> None:
    worker = Worker([noop], queues=[Store().open])
    worker.pause()
    serving = asyncio.create_task(worker.serve())
    await asyncio.sleep(0)
    worker.stop()
    assert await asyncio.wait_for(serving, 5) == 0


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_the_number_of_jobs_at_once_can_be_changed_while_they_run(kind: str) -> None:
    store, gate, running = Store(), asyncio.Event(), set[str]()
    loop = asyncio.get_running_loop()

    async def in_the_loop(job: Job) -> None:
        running.add(job.id)
        await gate.wait()

    def in_a_thread(job: Job) -> None:
        running.add(job.id)
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()

    handler = task("wait")(in_the_loop if kind == "async" else in_a_thread)
    store.add("wait", 12)
    settings = Settings(concurrency=2, claim_wait_ms=20)
    worker = Worker([handler], queues=[store.open], settings=settings)
    serving = asyncio.create_task(worker.serve())
    await until(lambda: len(running) == 2)
    worker.concurrency = 7
    await until(lambda: len(running) == 7)
    assert (worker.concurrency, worker.health().slots_total) == (7, 7)
    gate.set()
    await until(lambda: len(store.outcomes) == 12)
    with pytest.raises(UsageError, match="at least 1"):
        worker.concurrency = 0
    worker.stop()
    await serving


async def test_fewer_jobs_at_once_let_those_that_run_end_first() -> None:
    store, gates, most = Store(), asyncio.Semaphore(0), [0, 0]

    @task("wait")
    async def handler(job: Job) -> None:
        most[0] += 1
        most[1] = max(most)
        await gates.acquire()
        most[0] -= 1

    store.add("wait", 8)
    worker = Worker([handler], queues=[store.open], settings=Settings(concurrency=4))
    serving = asyncio.create_task(worker.serve())
    await until(lambda: most[0] == 4)
    worker.concurrency = 1
    for _ in range(4):
        gates.release()
    await until(lambda: len(store.outcomes) == 4 and most[0] == 1)
    most[1] = 0
    for _ in range(4):
        gates.release()
    await until(lambda: len(store.outcomes) == 8)
    assert most[1] == 1
    worker.stop()
    await serving
