"""Folders of attempts are gone afterwards, also those of workers that were killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tenure.core.errors import UsageError
from tenure.transcode.cage import Workspace, sweep
from tenure.transcode.storage import TranscodeSettings

CHILD = """
import asyncio, sys, time
from pathlib import Path
from tenure.core.errors import UsageError
from tenure.transcode.storage import TranscodeSettings
from tenure.transcode.cage import Workspace, sweep

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


def test_a_work_folder_of_another_user_or_a_link_is_refused(tmp_path: Path) -> None:
    """Planted in a shared /tmp before the worker starts."""
    victim = tmp_path / "victim"
    (victim / "boot-1").mkdir(parents=True, mode=0o700)
    (victim / "boot-1" / "precious").touch()
    root = tmp_path / "root"
    root.symlink_to(victim)
    if os.geteuid() == 0:
        os.lchown(root, 65_534, 65_534)
        for refuse in (lambda: Workspace(root).open(), lambda: sweep(root)):
            with pytest.raises(UsageError, match="is no folder"):
                refuse()
        root.unlink()
        root.mkdir(mode=0o777)
        os.chown(root, 65_534, 65_534)
        for refuse in (lambda: Workspace(root).open(), lambda: sweep(root)):
            with pytest.raises(UsageError, match="belongs to user 65534"):
                refuse()
    assert (victim / "boot-1" / "precious").exists()


def test_a_sweep_follows_no_links(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    root = tmp_path / "root"
    left = root / "boot-left"
    left.mkdir(parents=True, mode=0o700)
    (left / "link").symlink_to(victim)
    (root / "boot-link").symlink_to(victim)
    assert sweep(root) == ["boot-left"]
    assert (victim / "precious").exists()
    assert list(root.iterdir()) == []


async def test_all_work_folders_are_for_their_owner_alone_whatever_the_umask(
    tmp_path: Path,
) -> None:
    for umask in (0, 0o777):
        before = os.umask(umask)
        try:
            space = Workspace(tmp_path / f"root-{umask}").open()
            async with space.attempt() as folder:
                for each in (folder, space.folder, space.folder.parent):
                    assert each.stat().st_mode & 0o777 == 0o700
                assert (space.folder / ".lock").stat().st_mode & 0o777 == 0o600
            space.close()
        finally:
            os.umask(before)


def test_users_share_no_work_folder_by_default() -> None:
    assert TranscodeSettings().work_folder.name == f"tenure-{os.geteuid()}"
