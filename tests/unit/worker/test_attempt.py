"""Timeouts end handlers of every kind, and a handler that will not stop holds up nobody."""

import asyncio
import threading

import pytest

from tenure.core.outcome import Cancel, Fatal, Park, RateLimit, Retry, Snooze
from tenure.core.retry import exponential, fixed
from tenure.worker import Job, Settings, Worker, task
from tests.unit.worker.seam import Store, serving


async def test_a_timeout_ends_an_async_handler_as_failed() -> None:
    store = Store()
    store.add("slow")
    stopped = []

    @task("slow", timeout_s=0.05)
    async def slow(job: Job) -> str:
        assert job.deadline is not None
        try:
            await asyncio.sleep(60)  # only a cancel ends it
        finally:
            stopped.append(job.cancelled)
        return "never"

    worker = Worker([slow], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("settled")
    assert stopped == [True]
    assert (store.kinds(), store.code("slow-1")) == ({"slow-1": "fail"}, "timeout")


async def test_a_timeout_is_retried_by_the_policy_of_the_task() -> None:
    store = Store()
    store.add("slow")

    @task("slow", timeout_s=0.02, retry=fixed(1234))
    async def slow(job: Job) -> None:
        await asyncio.sleep(60)  # only a cancel ends it

    worker = Worker([slow], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("settled")
    assert store.kinds() == {"slow-1": "retry"}
    assert store.outcomes["slow-1"].delay_ms == 1234


async def test_a_handler_in_time_is_not_disturbed_by_its_timeout() -> None:
    store = Store()
    store.add("brisk", 20)

    @task("brisk", timeout_s=0.2)
    async def brisk(job: Job) -> None:
        await asyncio.sleep(0.01)  # the work

    worker = Worker([brisk], queues=[store.open], burst=True)
    await worker.serve()
    assert set(store.kinds().values()) == {"complete"}
    assert worker.watch.counts["ended"] == 0


async def test_a_timed_out_thread_is_settled_at_once_and_keeps_its_slot_until_it_returns() -> None:
    store = Store()
    store.add("stuck")
    let_go = threading.Event()
    seen = []

    @task("stuck", timeout_s=0.05)
    def stuck(job: Job) -> str:
        let_go.wait(10)
        seen.append(job.cancelled)
        return "too late"

    worker = Worker([stuck], queues=[store.open], concurrency=1)
    async with serving(worker):
        await worker.watch.until("settled")
        assert store.code("stuck-1") == "timeout"
        assert worker.health().slots_used == 1
        store.add("stuck")
        let_go.set()
        await worker.watch.until("settled", 2)
    assert seen[0] is True
    assert store.kinds() == {"stuck-1": "fail", "stuck-2": "complete"}


async def test_a_handler_that_swallows_its_cancellation_does_not_wedge_the_worker() -> None:
    store = Store()
    store.add("deaf", 2)
    over = asyncio.Event()

    @task("deaf", timeout_s=0.02)
    async def deaf(job: Job) -> None:
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    settings = Settings(cancel_grace_ms=30, concurrency=1)
    worker = Worker([deaf], queues=[store.open], settings=settings)
    async with serving(worker):
        await worker.watch.until("settled", 2)
        assert worker.watch.counts["abandoned"] == 2
        over.set()
    assert {store.code("deaf-1"), store.code("deaf-2")} == {"timeout"}


async def test_a_thread_is_told_of_a_cancel_request_and_may_stop_by_itself() -> None:
    store = Store(lease_ms=150)
    store.add("loop")

    @task("loop")
    def loop(job: Job) -> str:
        tick = threading.Event()
        while not job.cancelled:
            tick.wait(0.005)
        return "partial"

    worker = Worker([loop], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("extended")
        store.cancels.add("loop-1")
        await worker.watch.until("settled")
    assert store.kinds() == {"loop-1": "cancel"}
    assert worker.watch.counts["abandoned"] == 0


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ValueError("no"), "fail", "ValueError"),
        (Fatal("useless"), "bury", "Fatal"),
        (Retry(2.5), "retry", "Retry"),
        (Snooze(3), "snooze", ""),
        (RateLimit(3), "snooze", ""),
        (Park(), "bury", "no_children"),
        (Cancel("enough"), "cancel", "Cancel"),
        (SystemExit(3), "fail", "SystemExit"),
        (asyncio.CancelledError(), "fail", "CancelledError"),
    ],
)
async def test_what_a_handler_raises_decides_its_outcome(
    error: BaseException, kind: str, code: str
) -> None:
    store = Store()
    store.add("raise")

    @task("raise")
    async def raising(job: Job) -> None:
        raise error

    worker = Worker([raising], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("settled")
    assert (store.kinds(), store.code("raise-1")) == ({"raise-1": kind}, code)


async def test_a_policy_on_the_task_decides_about_retries() -> None:
    store = Store(reruns=True)
    store.add("fragile")

    @task("fragile", retry=exponential(1, max_attempts=3))
    async def fragile(job: Job) -> None:
        raise OSError("again")

    worker = Worker([fragile], queues=[store.open], burst=True)
    await worker.serve()
    assert store.attempts["fragile-1"] == 3
    assert store.kinds() == {"fragile-1": "bury"}


async def test_a_result_that_is_not_json_buries_the_job_with_a_clear_error() -> None:
    store = Store()
    store.add("odd")

    @task("odd", retry=exponential())
    async def odd(job: Job) -> object:
        return object()

    worker = Worker([odd], queues=[store.open], burst=True)
    await worker.serve()
    failure = store.outcomes["odd-1"].failure
    assert store.kinds() == {"odd-1": "bury"}
    assert failure is not None
    assert (failure.code, failure.retryable) == ("result_not_json", False)
    assert "returned object, which cannot be stored" in failure.message


async def test_a_job_nobody_here_can_run_is_handed_back_and_its_log_says_why() -> None:
    store = Store()
    store.add("rendre")

    @task("render")
    async def render(job: Job) -> None:
        return None

    worker = Worker([render], queues=[store.open], burst=True)
    assert await worker.serve() == 0
    assert store.kinds() == {"rendre-1": "snooze"}
    assert 1_000 <= store.outcomes["rendre-1"].delay_ms <= 1_250
    assert b"did you mean 'render'?" in store.reports[0].data


async def test_a_handler_for_any_task_takes_what_no_other_takes() -> None:
    store = Store()
    store.add("known")
    store.add("strange")
    seen = []

    @task("known")
    async def known(job: Job) -> None:
        seen.append("known")

    @task("*")
    async def anything(job: Job) -> None:
        seen.append(job.task)

    await Worker([known, anything], queues=[store.open], burst=True).serve()
    assert seen == ["known", "strange"]
