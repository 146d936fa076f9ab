"""Workers that wait on one SQLite file: what they cost while idle, and who is woken by what."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tenure.contracts.inbox import open_parts
from tenure.core.job import NewJob
from tenure.core.outcome import Outcome
from tenure.core.registry import open_ledger, open_queue, parse_url
from tests.waiting import until

JOB = NewJob(task="t", payload=b"{}")
APP = """
from tenure import task
@task("t")
async def t(job): return None
@task("webhook")
async def webhook(job): return None
"""
CLAIMS = """
import asyncio, os, signal, sys
from tenure.core.registry import open_queue
async def main():
    queue = open_queue(sys.argv[1], worker_id=sys.argv[2])
    while True:
        for lease in await queue.claim(1, wait_ms=60_000):
            print(lease.job_id, flush=True)
            if sys.argv[2] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
WORKERS = 10
IDLE_CORES_MAX = 0.05  # what 20 may use is 0.1
SECONDS = 5.0


@contextmanager
def workers(url: str, folder: Path, count: int) -> Iterator[list[int]]:
    """Processes that serve an inbox and its outbox."""
    (folder / "app.py").write_text(APP)
    command = [sys.executable, "-m", "tenure.cli", "worker", "app.py", "--log-level", "error"]
    command += ["--queue", url, "--queue", f"{url}?box=outbox"]
    running = [subprocess.Popen(command, cwd=folder) for _ in range(count)]
    try:
        yield [process.pid for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()


def cpu_s(pids: list[int]) -> float:
    """Processor time that processes have used."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.alone
async def test_idle_workers_use_next_to_no_processor_time(tmp_path: Path) -> None:
    url = f"inbox+sqlite:///{tmp_path}/jobs.db"
    queue, ledger = open_queue(url), open_ledger(url)
    outbox = open_ledger(f"{url}?box=outbox")
    with workers(url, tmp_path, WORKERS) as pids:

        async def all_there() -> bool:
            return (await outbox.counts()).workers == WORKERS

        await until(all_there, within_s=60)
        await queue.submit([JOB] * 20)

        async def all_done() -> bool:
            return (await ledger.counts()).states["succeeded"] == 20

        await until(all_done, within_s=60)
        before, began = cpu_s(pids), time.monotonic()
        await asyncio.sleep(SECONDS)  # it is idleness that is measured
        cores = (cpu_s(pids) - before) / (time.monotonic() - began)
    assert cores < IDLE_CORES_MAX, f"{cores:.3f} cores"
    for each in (queue, ledger, outbox):
        await each.close()


async def test_work_rings_for_its_own_queue_alone_and_for_one_of_those_who_wait(
    tmp_path: Path,
) -> None:
    url = f"inbox+sqlite:///{tmp_path}/jobs.db"
    engine, options = open_parts(parse_url(url))
    mine = [engine.listener(options.settings().queue) for _ in range(3)]
    other = engine.listener("other")
    for bell in (*mine, other):
        await bell.arm()
    rings = [asyncio.create_task(bell.wait(10_000)) for bell in (*mine, other)]
    queue = open_queue(url)
    await queue.submit([JOB])
    await until(lambda: any(ring.done() for ring in rings))
    await asyncio.sleep(0.05)  # nothing tells that no second one rings
    assert [ring.done() for ring in rings].count(True) == 1
    assert not rings[-1].done()
    for ring in rings:
        ring.cancel()
    await asyncio.gather(*rings, return_exceptions=True)
    for bell in (*mine, other):
        await bell.close()
    await queue.close()
    await engine.close()


async def test_all_who_wait_get_their_share_of_jobs_that_come_together(tmp_path: Path) -> None:
    """One is woken; who takes all that it asked for wakes the next."""
    url = f"inbox+sqlite:///{tmp_path}/jobs.db"
    queues = [open_queue(url, worker_id=f"w{n}") for n in range(6)]
    claims = [asyncio.create_task(queue.claim(2, wait_ms=20_000)) for queue in queues]
    await asyncio.sleep(0.3)  # all of them have looked in vain, and wait
    began = time.monotonic()
    await queues[0].submit([JOB] * 12)
    leases = await asyncio.gather(*claims)
    assert [len(each) for each in leases] == [2] * 6
    assert time.monotonic() - began < 10
    for queue in queues:
        await queue.close()


async def test_jobs_whose_wake_up_died_with_its_process_are_found_by_the_next_poll(
    tmp_path: Path,
) -> None:
    url = f"inbox+sqlite:///{tmp_path}/jobs.db"
    queue, submitted = open_queue(url), set[str]()
    with (tmp_path / "taken").open("wb") as taken:
        command = [sys.executable, "-c", CLAIMS, url]
        lives = await asyncio.create_subprocess_exec(*command, "lives", stdout=taken)
        dies = await asyncio.create_subprocess_exec(*command, "dies", stdout=taken)
        try:
            while dies.returncode is None:  # which of the two a submit wakes, time decides
                for answer in await queue.submit([JOB] * 3):
                    submitted.add(answer.job_id)
                await asyncio.sleep(0.06)  # another time, another preference

            def all_taken() -> bool:
                return set((tmp_path / "taken").read_text().split()) == submitted

            await until(all_taken, within_s=15)
        finally:
            lives.kill()
            await lives.wait()
    await queue.close()


async def test_a_job_that_goes_back_to_the_line_rings_for_one_who_waits(tmp_path: Path) -> None:
    url = f"inbox+sqlite:///{tmp_path}/jobs.db"
    queue, waiting = open_queue(url), open_queue(url, worker_id="w2")
    await queue.submit([JOB])
    (lease,) = await queue.claim(1, wait_ms=0)
    claim = asyncio.create_task(waiting.claim(1, wait_ms=20_000))
    await asyncio.sleep(0.1)  # it has looked in vain, and waits
    began = time.monotonic()
    await queue.settle([Outcome(lease, "release")])
    assert len(await claim) == 1
    assert time.monotonic() - began < 10
    await queue.close()
    await waiting.close()


async def test_what_another_program_writes_is_found_without_a_ring(tmp_path: Path) -> None:
    url = f"inbox+sqlite:///{tmp_path}/jobs.db"
    queue = open_queue(url)
    await queue.submit([JOB])
    await queue.claim(1, wait_ms=0)
    claim = asyncio.create_task(queue.claim(1, wait_ms=20_000))
    with sqlite3.connect(tmp_path / "jobs.db") as foreign:
        foreign.execute(
            "INSERT INTO inbox_jobs (job_id, queue, task, max_attempts, created_ms, updated_ms,"
            " payload) VALUES ('foreign', 'inbox', 't', 5, 1, 1, '{}')"
        )
    assert [lease.job_id for lease in await claim] == ["foreign"]
    await queue.close()
