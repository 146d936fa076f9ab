"""Handlers in threads and child processes, and what they see of their job."""

import asyncio
import os
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from tenure.core.errors import LeaseLost, ServerError, UsageError
from tenure.worker import Job, Settings, Worker, task
from tests.processes import runs
from tests.unit.worker import process_tasks as child
from tests.unit.worker.seam import Store, serving
from tests.waiting import until


async def until_gone(pids: list[int], timeout_s: float = 5) -> None:
    """Wait until none of the processes runs any more (a zombie does not run)."""
    await until(lambda: not any(map(runs, pids)), f"all of {pids} are gone", within_s=timeout_s)


def reported_pids(store: Store) -> list[int]:
    pids: list[int] = msgspec.json.decode(store.reports[0].data)["pids"]
    return pids


async def test_a_plain_function_runs_in_a_thread_and_reports_by_a_plain_call() -> None:
    store = Store()
    store.add("work", payload=b'{"n": 2}')
    threads: list[str] = []

    @task("work")
    def work(job: Job) -> int:
        threads.append(threading.current_thread().name)
        job.report(30, "begun", type="stage", data={"k": 1})
        return int(job.payload["n"]) * 2

    await Worker([work], queues=[store.open], burst=True).serve()
    assert threads[0].startswith("tenure-handler")
    assert store.outcomes["work-1"].result == b"4"
    report = store.reports[0]
    assert (report.type, report.step, report.progress) == ("stage", "begun", b"30")
    assert report.data == b'{"k":1}'


async def test_a_thread_that_reports_on_a_lost_lease_is_told_so() -> None:
    store = Store()
    store.add("work")
    met: list[str] = []

    @task("work")
    def work(job: Job) -> None:
        store.stolen.add(job.id)
        try:
            job.report(1)
        except LeaseLost:
            met.append(job.id)
            raise

    worker = Worker([work], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("lost")
        # The worker counts the loss before the thread runs again.
        await until(lambda: met == ["work-1"], "the thread was told")
    assert store.calls["settle"] == 0


async def test_no_more_threads_run_than_the_pool_has() -> None:
    store = Store()
    store.add("work", 12)
    lock, running, most = threading.Lock(), 0, 0

    @task("work")
    def work(job: Job) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.01)
        with lock:
            running -= 1

    worker = Worker([work], queues=[store.open], concurrency=3, burst=True)
    await worker.serve()
    assert most <= 3
    assert len(store.outcomes) == 12


async def test_a_process_handler_runs_elsewhere_and_reports_and_returns() -> None:
    store = Store()
    store.add("pid", 3, payload=b'{"x": 1}')
    store.add("apid")
    worker = Worker([child.pid, child.apid], queues=[store.open], concurrency=1, burst=True)
    await worker.serve()
    results = [msgspec.json.decode(store.outcomes[f"pid-{n}"].result) for n in (1, 2, 3)]
    assert {result["pid"] for result in results} != {os.getpid()}
    assert len({result["pid"] for result in results}) == 1  # a child is used again
    assert results[0]["payload"] == {"x": 1}
    assert [report.progress for report in store.reports] == [b"50", b"50", b"50", b"10"]
    assert msgspec.json.decode(store.outcomes["apid-1"].result) == results[0]["pid"]
    await until_gone([results[0]["pid"]])


async def test_a_timeout_kills_the_process_and_all_it_started() -> None:
    store = Store()
    store.add("hang")
    worker = Worker([child.hang], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("settled", timeout_s=20)
        await until_gone(reported_pids(store))
    assert store.code("hang-1") == "timeout"


async def test_a_cancel_request_kills_the_process() -> None:
    store = Store(lease_ms=300)
    store.add("forever")
    worker = Worker([child.forever], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("reported", timeout_s=20)
        store.cancels.add("forever-1")
        await worker.watch.until("settled")
        await until_gone(reported_pids(store))
    assert store.kinds() == {"forever-1": "cancel"}


async def test_a_lost_lease_kills_the_process_and_nothing_is_written() -> None:
    store = Store(lease_ms=300)
    store.add("forever")
    worker = Worker([child.forever], queues=[store.open])
    async with serving(worker):
        await worker.watch.until("reported", timeout_s=20)
        store.stolen.add("forever-1")
        await worker.watch.until("lost")
        await until_gone(reported_pids(store))
    assert store.calls["settle"] == 0


async def test_a_process_that_dies_is_a_failed_attempt_and_its_place_is_filled_again() -> None:
    store = Store()
    store.add("die", 2)
    store.add("raise")
    store.add("odd")
    tasks = [child.die, child.raising, child.odd]
    await Worker(tasks, queues=[store.open], concurrency=1, burst=True).serve()
    assert store.code("die-1") == store.code("die-2") == "process_died"
    failure = store.outcomes["die-1"].failure
    assert failure is not None
    assert "exit code 9" in failure.message
    assert (store.kinds()["raise-1"], store.outcomes["raise-1"].delay_ms) == ("retry", 1500)
    assert (store.kinds()["odd-1"], store.code("odd-1")) == ("bury", "result_not_json")


async def test_a_report_refused_by_the_store_is_raised_in_the_process() -> None:
    store = Store()
    store.before["report"] = lambda _: ServerError("ERR too long")
    store.add("pid")
    settings = Settings(settle_tries_max=1)
    await Worker([child.pid], queues=[store.open], settings=settings, burst=True).serve()
    failure = store.outcomes["pid-1"].failure
    assert failure is not None
    assert (failure.code, failure.message) == ("store", "ERR too long")


def test_a_process_handler_must_be_importable() -> None:
    with pytest.raises(UsageError, match="top of a module"):

        @task("inner", process=True)
        def inner(job: Job) -> None:
            return None


async def test_an_app_file_without_a_main_guard_can_have_process_handlers(tmp_path: Path) -> None:
    """The child imports the file; the worker at its end must not start a second time there."""
    app = tmp_path / "app.py"
    app.write_text(
        "import asyncio, os\n"
        "from tenure import NewJob, Worker, open_ledger, open_queue, task\n"
        "@task('pid', process=True)\n"
        "def pid(job):\n"
        "    return os.getpid()\n"
        "url = 'memory://unguarded'\n"
        "job = NewJob(task='pid', payload=b'{}', job_id='one')\n"
        "asyncio.run(open_queue(url).submit([job]))\n"
        "print('exit', Worker([pid], queues=[url], burst=True).run())\n"
        "print(asyncio.run(open_ledger(url).get('one')).state)\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(app), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 30)
    assert out.decode().splitlines()[-2:] == ["exit 0", "done"]


async def test_a_handlers_process_dies_with_its_worker_however_that_died(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(
        "import asyncio, os, time\n"
        "from tenure import NewJob, Worker, open_queue, task\n"
        "@task('hang', process=True)\n"
        "def hang(job):\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "job = NewJob(task='hang', payload=b'{}')\n"
        "asyncio.run(open_queue('memory://orphans').submit([job]))\n"
        "Worker([hang], queues=['memory://orphans']).run()\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(app), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    pid = int(await asyncio.wait_for(process.stdout.readline(), 30))
    process.kill()
    await process.wait()
    await until_gone([pid])


async def test_half_a_surrogate_pair_of_a_child_process_is_replaced_and_the_job_says_so() -> None:
    store = Store()
    store.add("half")
    store.add("half", payload=b"1")
    await Worker([child.half], queues=[store.open], burst=True).serve()
    assert store.outcomes["half-1"].result == '"a\ufffdb"'.encode()
    assert b"replaced" in store.reports[-1].data + store.reports[1].data
    failure = store.outcomes["half-2"].failure
    assert failure is not None
    assert failure.message.startswith("broken \ufffd (")
