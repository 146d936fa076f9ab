"""Folders of attempts are gone afterwards, also those of workers that were killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from leasehold.transcode.workspace import Workspace

CHILD = """
import asyncio, sys, time
from pathlib import Path
from leasehold.transcode.workspace import Workspace

async def main():
    space = Workspace(Path(sys.argv[1])).open()
    async with space.attempt() as folder:
        (folder / "input").write_bytes(b"x" * 1000)
        print(folder, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_an_attempt_leaves_nothing_behind_however_it_ends(tmp_path: Path) -> None:
    space = Workspace(tmp_path).open()
    folders: list[Path] = []

    async def fail() -> None:
        async with space.attempt() as folder:
            folders.append(folder)
            (folder / "deep").mkdir()
            (folder / "deep" / "file").write_bytes(b"x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    assert not folders[0].exists()

    async def hang(started: asyncio.Event) -> None:
        async with space.attempt() as inner:
            (inner / "file").write_bytes(b"x")
            started.set()
            await asyncio.Event().wait()

    started = asyncio.Event()
    hanging = asyncio.create_task(hang(started))
    await started.wait()
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    assert [path.name for path in space.folder.iterdir()] == [".lock"]
    space.close()
    assert list(tmp_path.iterdir()) == []


def start_child(root: Path) -> tuple[subprocess.Popen[str], Path]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


def test_a_start_sweeps_the_dead_and_leaves_the_living_alone(tmp_path: Path) -> None:
    dead, dead_folder = start_child(tmp_path)
    alive, alive_folder = start_child(tmp_path)
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    assert (dead_folder / "input").exists()
    space = Workspace(tmp_path).open()
    assert not dead_folder.parent.exists()
    assert (alive_folder / "input").exists()
    assert space.swept == [dead_folder.parent.name]
    alive.kill()
    alive.wait()
    space.close()
    for child in (dead, alive):
        assert child.stdout is not None
        child.stdout.close()
