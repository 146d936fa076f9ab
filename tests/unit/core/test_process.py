"""Children that are kept running, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tenure.cli.console import note_child_line
from tenure.core.process import ChildFailed, Supervisor
from tests.processes import runs
from tests.waiting import until

SLEEPER = "import time; print('hello', flush=True); time.sleep(300)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('deaf', flush=True); time.sleep(300)"
)


class Scene:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.supervisor = Supervisor(self.said.append, os.environ, note_child_line)

    async def start(self, code: str, name: str = "part", *, once: bool = False) -> int:
        await self.supervisor.start(name, [sys.executable, "-c", code], once=once)
        return self.supervisor.pid(name) or 0


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    yield scene
    scene.supervisor.stop_now.set()
    await scene.supervisor.stop("part", 0.1)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_a_killed_child_is_started_again_and_said_so(scene: Scene) -> None:
    first = await scene.start(SLEEPER)
    os.kill(first, signal.SIGKILL)
    await until(lambda: scene.supervisor.pid("part") not in (None, first))
    await until(lambda: len(scene.said) == 2)
    assert scene.said[0] == "part was ended by SIGKILL: starting it again"
    assert scene.said[1].startswith("part runs again (pid ")


async def test_what_a_child_says_comes_with_its_name(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    await scene.start(SLEEPER)
    heard = ""
    async with asyncio.timeout(20):
        while "part | hello\n" not in heard:
            heard += capsys.readouterr().err
            await asyncio.sleep(0.01)  # looks again until the deadline


async def test_a_stopped_child_stays_stopped(scene: Scene) -> None:
    pid = await scene.start(SLEEPER)
    await scene.supervisor.stop("part", 20)
    assert not alive(pid)
    assert scene.said == []


async def test_a_deaf_child_is_killed_when_somebody_is_in_a_hurry(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = await scene.start(STUBBORN)
    heard = ""
    async with asyncio.timeout(20):
        while "deaf" not in heard:
            heard += capsys.readouterr().err
            await asyncio.sleep(0.01)  # looks again until the deadline
    scene.supervisor.stop_now.set()
    begin = time.monotonic()
    await scene.supervisor.stop("part", 60)
    assert not alive(pid)
    assert time.monotonic() - begin < 20


async def test_a_child_that_cannot_start_ends_the_whole_with_its_last_words(scene: Scene) -> None:
    await scene.start("import sys; print('no such option'); sys.exit(2)")
    with pytest.raises(
        ChildFailed, match=r"part does not start \(ended with exit code 2\): no such option"
    ):
        await asyncio.wait_for(scene.supervisor.until(asyncio.Event()), 20)


async def test_a_child_that_may_end_by_itself_is_not_started_again(scene: Scene) -> None:
    await scene.start("pass", once=True)
    await asyncio.wait_for(scene.supervisor.until(asyncio.Event()), 20)
    assert scene.said == []


async def test_children_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    child = (
        "import os, pathlib, time;"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); time.sleep(300)"
    )
    parent = (
        "import signal, subprocess, sys; from tenure.core.process import bound_to_parent;"
        f"command = [sys.executable, '-c', {child!r}];"
        "subprocess.run(bound_to_parent(command, dies_by=signal.SIGTERM))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", parent)
    await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    process.kill()
    await process.wait()
    await until(lambda: not runs(pid))
