"""The faults are what they say: one that hits a worker hits nobody else."""

import asyncio
import fcntl
import sys
from pathlib import Path
from random import Random

from tests.chaos.faults import Faults
from tests.chaos.herd import Herd
from tests.chaos.sql_subjects import SqliteInboxSubject
from tests.waiting import until

MOSTLY_LOCKED = """
import fcntl, sys, time
with open(sys.argv[1], "w") as file:
    while True:
        fcntl.flock(file, fcntl.LOCK_EX)
        time.sleep(0.03)
        fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(0.01)
"""


async def test_a_worker_is_stopped_when_it_keeps_nobody_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    async with Herd(tmp_path) as herd:
        member = herd.add("worker", [sys.executable, "-c", MOSTLY_LOCKED, str(path)], slots=1)
        faults = Faults(tmp_path / "faults", SqliteInboxSubject(tmp_path), herd, Random(1))
        await until(path.exists, "the worker has its file")
        for _ in range(10):
            stopped = asyncio.Event()
            stopping = asyncio.create_task(faults.stop_worker(member, 20, stopped))
            await stopped.wait()
            with path.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError if it had it
            await stopping
        faults.close()
        assert [fault.workers for fault in faults.injected] == [("worker.1",)] * 10
