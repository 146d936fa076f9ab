"""The faults are what they say: one that hits a worker hits nobody else."""

import asyncio
import sys
from pathlib import Path
from random import Random

from tenure.store.sqlite import FairLock
from tests.chaos.faults import Faults
from tests.chaos.herd import Herd
from tests.chaos.sql_subjects import SqliteInboxSubject
from tests.waiting import until

ALWAYS_AT_IT = """
import sys
from pathlib import Path
from tenure.store.sqlite import FairLock
file = Path(sys.argv[1])
lock = FairLock(file)
file.with_name("at-it").touch()
while True:
    with lock:
        pass
"""


async def test_a_worker_is_stopped_when_it_keeps_nobody_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "jobs.db"
    argv = [sys.executable, "-c", ALWAYS_AT_IT, str(file)]
    lock = FairLock(file)

    def others_pass() -> bool:
        with lock:
            return member.stopped

    async with Herd(tmp_path) as herd:
        member = herd.add("worker", argv, slots=1)
        herd.add("other", argv, slots=1)
        faults = Faults(tmp_path / "faults", SqliteInboxSubject(tmp_path), herd, Random(1))
        await until((tmp_path / "at-it").exists, "the worker is at it")
        for _ in range(10):
            stopped = asyncio.Event()
            stopping = asyncio.create_task(faults.stop_worker(member, 60_000, stopped))
            await stopped.wait()
            assert await asyncio.to_thread(others_pass)
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
        faults.close()
        assert [fault.workers for fault in faults.injected] == [("worker.1",)] * 10
    lock.close()
