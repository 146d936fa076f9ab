"""The worker in a loop whose time is virtual: no threads, no waiting, the same seed twice."""

import asyncio
import heapq
import selectors
import threading
import time
from collections.abc import Coroutine
from random import Random
from typing import Any

from tenure.core.errors import ReplyLost, StoreUnreachable
from tenure.core.retry import exponential
from tenure.worker import Job, Settings, Worker, task
from tests.unit.worker.seam import Store


class VirtualLoop(asyncio.SelectorEventLoop):
    """Whenever everything waits, time jumps to the next timer."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(selectors.SelectSelector())

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
            heapq.heapify(self._scheduled)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run_virtually(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


async def _scenario(seed: int) -> list[tuple[float, str, int]]:
    chance = Random(seed)
    loop = asyncio.get_running_loop()
    store = Store(lease_ms=15_000, reruns=True)
    store.before["claim"] = lambda _: StoreUnreachable("x") if chance.random() < 0.1 else None
    store.before["extend"] = lambda _: StoreUnreachable("x") if chance.random() < 0.1 else None
    store.after["settle"] = lambda _: ReplyLost("x") if chance.random() < 0.2 else None
    trace: list[tuple[float, str, int]] = []

    @task("long", timeout_s=400, retry=exponential(max_attempts=3))
    async def long(job: Job) -> None:
        await job.report(1)
        await asyncio.sleep(chance.random() * 100)
        if chance.random() < 0.2:
            raise OSError("now and then")

    store.add("long", 20)
    settings = Settings(keeper_threaded=False, worker_id="w", concurrency=5)
    worker = Worker([long], queues=[store.open], settings=settings, rng=Random(seed), burst=True)
    worker.watch.hooks.append(lambda name, count: trace.append((loop.time(), name, count)))
    assert await worker.serve() == 0
    assert len(store.outcomes) == 20
    return trace


def test_minutes_of_work_take_a_moment_and_no_thread() -> None:
    before, began = set(threading.enumerate()), time.monotonic()
    trace = run_virtually(_scenario(1))
    assert trace[-1][0] > 100  # virtual seconds
    assert time.monotonic() - began < 20
    assert not set(threading.enumerate()) - before


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    first, again, other = (run_virtually(_scenario(seed)) for seed in (7, 7, 8))
    assert first == again
    assert first != other
