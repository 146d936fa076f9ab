"""Stopping: finish what runs, hand back what cannot finish, and leave nothing half done."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tenure.worker import Job, Settings, Worker, task
from tenure.worker.worker import Stopping
from tests.unit.worker.seam import Store, serving


async def test_a_stop_lets_running_handlers_finish_and_claims_no_more() -> None:
    store = Store()
    store.add("wait", 2)
    gate = asyncio.Event()

    @task("wait")
    async def wait(job: Job) -> str:
        await gate.wait()
        return "finished"

    worker = Worker([wait], queues=[store.open])
    async with serving(worker) as serve:
        await worker.watch.until("started", 2)
        worker.stop()
        await worker.watch.until("draining")
        store.add("wait", 3)
        gate.set()
        assert await serve == 0
    kinds = store.kinds()
    assert (kinds.pop("wait-1"), kinds.pop("wait-2")) == ("complete", "complete")
    # A claim that was under way may have brought the others; they did not start.
    assert set(kinds.values()) <= {"release"}
    assert len(store.waiting) + len(kinds) == 3
    assert worker.watch.counts["started"] == 2
    assert store.calls["close"] == 2  # the worker's instance and the keeper's


async def test_what_a_claim_under_way_brings_after_the_stop_is_handed_back_unstarted() -> None:
    store = Store()
    gate = store.gates["claim"] = asyncio.Event()
    store.add("never")

    @task("never")
    async def never(job: Job) -> None:
        raise AssertionError("must not start")

    worker = Worker([never], queues=[store.open])
    async with serving(worker) as serve:
        await worker.watch.until("upkeep")
        worker.stop()
        await worker.watch.until("draining")
        gate.set()
        assert await serve == 0
    assert store.kinds() == {"never-1": "release"}


async def test_handlers_that_outlast_the_drain_are_cancelled_and_released_not_failed() -> None:
    store = Store()
    store.add("long", 3)

    @task("long")
    async def long(job: Job) -> None:
        await asyncio.sleep(60)  # only a cancel ends it

    worker = Worker([long], queues=[store.open], settings=Settings(drain_ms=50))
    async with serving(worker) as serve:
        await worker.watch.until("started", 3)
        worker.stop()
        assert await serve == 0
    assert set(store.kinds().values()) == {"release"}
    assert len(store.outcomes) == 3


async def test_a_second_request_releases_everything_at_once() -> None:
    """Even when a handler does not let itself be cancelled."""
    store = Store()
    store.add("deaf")
    over = asyncio.Event()

    @task("deaf")
    async def deaf(job: Job) -> None:
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    worker = Worker([deaf], queues=[store.open])
    async with serving(worker) as serve:
        await worker.watch.until("started")
        worker.stop()
        await worker.watch.until("draining")
        assert not serve.done()
        began = time.monotonic()
        worker.stop(at_once=True)
        assert await serve == 1  # not a clean drain
        assert time.monotonic() - began < 15  # a drain may take 30
        over.set()
    assert store.kinds() == {"deaf-1": "release"}


async def test_jobs_that_wait_for_a_thread_are_released_when_the_drain_begins() -> None:
    store = Store()
    store.add("block", 4)
    gate, began = threading.Event(), threading.Event()

    @task("block")
    def block(job: Job) -> None:
        began.set()
        gate.wait(10)

    settings = Settings(threads=1, concurrency=4)
    worker = Worker([block], queues=[store.open], settings=settings)
    async with serving(worker) as serve:
        await worker.watch.until("started", 4)
        while not began.is_set():
            await asyncio.sleep(0)
        worker.stop()
        await worker.watch.until("settled", 3)
        gate.set()
        assert await serve == 0
    kinds = list(store.kinds().values())
    assert sorted(kinds) == ["complete", "release", "release", "release"]


async def test_a_thread_that_never_returns_cannot_keep_a_stopped_worker() -> None:
    store = Store()
    store.add("stuck")
    gate, began = threading.Event(), threading.Event()

    @task("stuck")
    def stuck(job: Job) -> None:
        began.set()
        gate.wait(30)

    settings = Settings(drain_ms=20, cancel_grace_ms=50)
    worker = Worker([stuck], queues=[store.open], settings=settings)
    async with serving(worker) as serve:
        while not began.is_set():
            await asyncio.sleep(0)
        worker.stop()
        assert await asyncio.wait_for(serve, 5) == 0
    assert worker.watch.counts["abandoned"] == 1
    gate.set()
    assert store.kinds() == {"stuck-1": "release"}


async def test_two_signals_within_a_moment_count_as_one() -> None:
    """Service managers signal a whole group and then its leader again."""
    stopping = Stopping()
    stopping.on_signal()
    stopping.on_signal()
    assert stopping.drain.is_set()
    assert not stopping.release.is_set()
    await asyncio.sleep(0.11)  # longer than one press
    stopping.on_signal()
    assert stopping.release.is_set()


async def test_cancelling_serve_writes_nothing_more() -> None:
    """As if the plug had been pulled: that is what a simulated crash needs."""
    store = Store()
    store.add("wait")

    @task("wait")
    async def wait(job: Job) -> None:
        await asyncio.sleep(60)  # only a cancel ends it

    worker = Worker([wait], queues=[store.open])
    serve = asyncio.create_task(worker.serve())
    await worker.watch.until("started")
    serve.cancel()
    await asyncio.wait([serve])
    assert serve.cancelled()
    await asyncio.sleep(0)
    assert store.calls["settle"] == 0
    assert worker.health().state == "stopped"


APP = """
import asyncio, sys
from tenure.worker import Settings, Worker, task
sys.path.insert(0, {root!r})
from tests.unit.worker.seam import Store

store = Store()
store.add("wait", 2)

@task("wait")
async def wait(job):
    print("started", flush=True)
    await asyncio.sleep({sleep_s})

worker = Worker([wait], queues=[store.open], settings=Settings(drain_ms=20_000))
code = worker.run()
print(sorted(store.kinds().values()), flush=True)
sys.exit(code)
"""


def _run(tmp_path: Path, sleep_s: float) -> subprocess.Popen[str]:
    app = tmp_path / "app.py"
    app.write_text(APP.format(root=str(Path(__file__).parents[3]), sleep_s=sleep_s))
    process = subprocess.Popen([sys.executable, str(app)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["started\n", "started\n"]
    return process


def test_sigterm_drains_a_real_process_and_exits_with_0(tmp_path: Path) -> None:
    process = _run(tmp_path, 0.5)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert (out.strip(), process.returncode) == ("['complete', 'complete']", 0)


def test_a_second_signal_releases_at_once_in_a_real_process(tmp_path: Path) -> None:
    process = _run(tmp_path, 60)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)  # two presses, not one
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert (out.strip(), process.returncode) == ("['release', 'release']", 1)
