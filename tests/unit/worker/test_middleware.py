"""What surrounds handlers: a lifespan for the whole worker, middleware for every attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from tenure import Handle, Job, JobFailed, Retry, Worker, task
from tenure.core.errors import UsageError
from tenure.testing import FakeJob, run_task, serving
from tenure.worker import Settings
from tenure.worker.job import CallNext
from tests.unit.worker import process_tasks as child
from tests.unit.worker.seam import Store
from tests.waiting import until


async def until_scheduled(handle: Handle[Any]) -> None:
    async def is_scheduled() -> bool:
        return (await handle.status()).state == "scheduled"

    await until(is_scheduled)


shade: ContextVar[str] = ContextVar("shade", default="")


@task("loop")
async def in_loop(job: Job) -> Any:
    return [job.state, shade.get()]


@task("thread")
def in_thread(job: Job) -> Any:
    return [job.state, shade.get()]


@task("typed")
async def typed(job: Job, name: str) -> str:
    return f"{name} {job.state}"


@asynccontextmanager
async def model() -> AsyncIterator[str]:
    yield "weights"


async def test_handlers_have_the_value_of_the_lifespan_as_their_state() -> None:
    async with serving(in_loop, in_thread, typed, lifespan=model) as queue:
        for name in ("loop", "thread"):
            handle = await queue.client.submit(name, {})
            assert await handle.result(timeout_s=10) == ["weights", ""]
        assert (
            await (await queue.client.submit(typed, name="a")).result(timeout_s=10) == "a weights"
        )


async def test_the_lifespan_is_open_before_the_first_job_and_until_the_last() -> None:
    events: list[str] = []
    store = Store()
    store.add("note", 2)

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        events.append("entered")
        yield
        events.append("left")

    @task("note")
    async def note(job: Job) -> None:
        events.append("job")
        assert job.state is None

    worker = Worker([note], queues=[store.open], lifespan=lifespan, burst=True)
    worker.on("closed", lambda: events.append("closed"))
    await worker.serve()
    assert events == ["entered", "job", "job", "closed", "left"]


async def test_a_worker_whose_lifespan_fails_takes_no_job() -> None:
    store = Store()
    store.add("loop")

    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise RuntimeError("no model")
        yield

    with pytest.raises(RuntimeError, match="no model"):
        await Worker([in_loop], queues=[store.open], lifespan=broken).serve()
    assert store.calls["claim"] == 0


async def test_a_child_process_enters_the_lifespan_once_and_leaves_it_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENURE_TEST_NOTES", str(tmp_path))
    store = Store()
    settings = Settings(processes=1, concurrency=1)
    tasks = [child.uses, child.uses_async]
    store.add("uses", 2)
    store.add("uses_async", 1)
    worker = Worker(tasks, queues=[store.open], lifespan=child.lifespan, settings=settings)
    serve = asyncio.create_task(worker.serve())
    await worker.watch.until("settled", 3, timeout_s=30)
    worker.stop()
    assert await serve == 0
    (notes,) = tmp_path.iterdir()  # this process did not enter it: it runs no handler
    assert notes.read_text() == "entered\nleft\n"
    results = [store.outcomes[job].result for job in ("uses-1", "uses-2", "uses_async-1")]
    assert results == [f"[{notes.stem},{n}]".encode() for n in (1, 2, 3)]


def test_a_lifespan_that_cannot_be_used_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="give the function itself"):
        Worker([in_loop], queues=["memory://a"], lifespan=model())  # type: ignore[arg-type]

    @asynccontextmanager
    async def local() -> AsyncIterator[None]:
        yield

    with pytest.raises(UsageError, match="at the top of a module"):
        Worker([child.uses], queues=["memory://a"], lifespan=local)


@pytest.mark.parametrize("handler", [in_loop, in_thread], ids=["async", "thread"])
async def test_middleware_surrounds_an_attempt_in_order_and_its_context_reaches_the_handler(
    handler: Any,
) -> None:
    events: list[str] = []

    async def outer(attempt: Job, call_next: CallNext) -> Any:
        events.append(f"outer {attempt.task} {attempt.attempt}")
        shade.set("blue")
        value = await call_next(attempt)
        events.append("outer ends")
        return [*value, "seen"]

    async def inner(attempt: Job, call_next: CallNext) -> Any:
        events.append("inner")
        return await call_next(attempt)

    async with serving(handler, middleware=[outer, inner]) as queue:
        handle = await queue.client.submit(handler.name, {})
        assert await handle.result(timeout_s=10) == [None, "blue", "seen"]
    assert events == [f"outer {handler.name} 1", "inner", "outer ends"]


async def test_middleware_surrounds_handlers_in_processes() -> None:
    seen: list[Any] = []

    async def watch(attempt: Job, call_next: CallNext) -> Any:
        try:
            value = await call_next(attempt)
        except Exception as error:
            seen.append((attempt.task, type(error).__name__, str(error)))
            raise
        seen.append((attempt.task, type(value)))
        return {**value, "more": 1} if attempt.payload.get("change") else value

    tasks = [child.pid, child.broken, child.raising, child.snoozing]
    async with serving(*tasks, middleware=[watch], max_attempts=2) as queue:
        plain = await (await queue.client.submit("pid", {})).result(timeout_s=30)
        assert set(plain) == {"pid", "payload", "attempt"}
        changed = await (await queue.client.submit("pid", {"change": True})).result(timeout_s=30)
        assert changed["more"] == 1
        with pytest.raises(JobFailed, match="division by zero"):
            await (await queue.client.submit("broken", {}, attempts=1)).result(timeout_s=30)
        handle = await queue.client.submit("raise", {})
        await until_scheduled(handle)  # as it was judged in the child
        await until_scheduled(await queue.client.submit("snooze", {}))
    assert seen == [
        ("pid", dict),
        ("pid", dict),
        ("broken", "HandlerFailed", "division by zero"),
        ("raise", "HandlerFailed", "not yet"),
        ("snooze", "Snooze", "the handler snoozed the job"),
    ]


async def test_middleware_may_answer_for_the_handler_or_fail_the_attempt() -> None:
    async def gate(attempt: Job, call_next: CallNext) -> Any:
        if attempt.payload.get("cached"):
            return "cached"
        raise Retry(60, "closed")

    async with serving(in_loop, middleware=[gate]) as queue:
        handle = await queue.client.submit("loop", {"cached": True})
        assert await handle.result(timeout_s=10) == "cached"
        waiting = await queue.client.submit("loop", {}, attempts=2)
        await until_scheduled(waiting)


async def test_a_timeout_reaches_the_middleware_of_the_attempt() -> None:
    seen: list[str] = []

    @task("slow", timeout_s=0.01)
    async def slow(job: Job) -> None:
        await asyncio.Event().wait()

    async def watch(attempt: Job, call_next: CallNext) -> Any:
        try:
            return await call_next(attempt)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async with serving(slow, middleware=[watch], max_attempts=1) as queue:
        with pytest.raises(JobFailed):
            await (await queue.client.submit("slow", {})).result(timeout_s=10)
    assert seen == ["cancelled"]


async def test_a_handler_can_be_tested_with_a_state() -> None:
    assert await run_task(typed, job=FakeJob(state="little"), name="a") == "a little"
