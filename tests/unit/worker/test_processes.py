"""The supervisor of `--processes N`, with real processes."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from leasehold.worker.processes import Supervision, Supervisor

QUICK = Supervision(restart_ms=10, restart_ms_max=50)

# Prints nothing, notes its start in a folder, exits 0 at SIGTERM after a little tidying.
COPY = """
import os, pathlib, signal, sys, time
def stop(number, frame):
    time.sleep(0.05)
    pathlib.Path(sys.argv[1], f"stopped-{os.getpid()}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
number = os.environ["LEASEHOLD_PROCESS"]
pathlib.Path(sys.argv[1], f"started-{os.getpid()}-{number}").touch()
time.sleep(60)
"""


class Herd:
    """A supervisor with an event for everything it tells."""

    def __init__(self, code: str, folder: Path, count: int) -> None:
        self.folder = folder
        self.events: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.supervisor = Supervisor(
            [sys.executable, "-c", code, str(folder)],
            count,
            environ=os.environ,
            supervision=QUICK,
            on_event=lambda name, number: self.events.put_nowait((name, number)),
        )

    async def until(self, pattern: str, count: int) -> list[str]:
        async with asyncio.timeout(15):
            while len(found := sorted(path.name for path in self.folder.glob(pattern))) < count:
                await asyncio.sleep(0.01)  # looks again
        return found

    @contextlib.asynccontextmanager
    async def supervised(self) -> AsyncGenerator[asyncio.Task[int]]:
        task = asyncio.create_task(self.supervisor.supervise())
        try:
            yield task
        finally:
            self.supervisor.forward(signal.SIGKILL)
            await asyncio.wait([task], timeout=10)


async def test_it_starts_as_many_as_asked_and_drains_them_on_a_signal(tmp_path: Path) -> None:
    herd = Herd(COPY, tmp_path, 2)
    async with herd.supervised() as task:
        started = await herd.until("started-*", 2)
        assert sorted(name.rpartition("-")[2] for name in started) == ["0", "1"]
        herd.supervisor.forward(signal.SIGTERM)
        assert await asyncio.wait_for(task, 10) == 0
    assert len(list(tmp_path.glob("stopped-*"))) == 2


async def test_a_crashed_process_comes_back(tmp_path: Path) -> None:
    herd = Herd(COPY, tmp_path, 1)
    async with herd.supervised() as task:
        (first,) = await herd.until("started-*", 1)
        os.kill(int(first.split("-")[1]), signal.SIGKILL)
        await herd.until("started-*", 2)
        herd.supervisor.forward(signal.SIGTERM)
        assert await asyncio.wait_for(task, 10) == 0
    told = [herd.events.get_nowait() for _ in range(herd.events.qsize())]
    assert [name for name, _ in told] == ["started", "exited", "restarting", "started", "exited"]
    assert told[1] == ("exited", -signal.SIGKILL)


async def test_a_process_that_is_done_is_not_started_again(tmp_path: Path) -> None:
    herd = Herd("pass", tmp_path, 2)
    assert await asyncio.wait_for(herd.supervisor.supervise(), 10) == 0
    names = [herd.events.get_nowait()[0] for _ in range(herd.events.qsize())]
    assert sorted(names) == ["exited", "exited", "started", "started"]


async def test_the_worst_exit_code_is_handed_on(tmp_path: Path) -> None:
    code = "import signal, sys, time, pathlib, os\nsignal.signal(15, lambda *_: sys.exit(3))\n"
    code += "pathlib.Path(sys.argv[1], f'started-{os.getpid()}').touch()\ntime.sleep(60)"
    herd = Herd(code, tmp_path, 1)
    async with herd.supervised() as task:
        await herd.until("started-*", 1)
        herd.supervisor.forward(signal.SIGTERM)
        assert await asyncio.wait_for(task, 10) == 3


async def test_copies_drain_when_the_supervisor_itself_is_killed(tmp_path: Path) -> None:
    """A kill -9 of the supervisor must not leave workers that nobody looks after."""
    copy = tmp_path / "copy.py"
    copy.write_text(COPY)
    script = (
        "import os, sys\nfrom leasehold.worker.processes import Supervisor\n"
        f"Supervisor([sys.executable, {str(copy)!r}, {str(tmp_path)!r}], 2, "
        "environ=os.environ).run()"
    )
    herd = Herd("pass", tmp_path, 1)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    await herd.until("started-*", 2)
    process.kill()
    await process.wait()
    await herd.until("stopped-*", 2)


def test_no_processes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Supervisor(["x"], 0, environ={})
