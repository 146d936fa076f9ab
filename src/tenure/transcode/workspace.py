"""Folders for attempts: one per boot, one per attempt within it, and none left behind.

A `finally` removes an attempt's folder. A worker that was killed cannot do that, so each boot locks
its own folder, and every worker that starts sweeps the folders that no process holds. The root is
for its owner alone: in a shared /tmp, a folder of another user or a link is refused, never used.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from tenure.core.errors import UsageError
from tenure.store.files import private_file, private_folder

_PREFIX = "boot-"
_LOCK = ".lock"


class Workspace:
    """The folder of this boot. `open` sweeps first."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder: Path | None = None
        self._lock_fd = -1
        self.swept: list[str] = []

    @property
    def folder(self) -> Path:
        """This boot's own folder."""
        if self._folder is None:
            raise UsageError("the workspace has not been opened")
        return self._folder

    def open(self) -> Workspace:
        """Remove what dead workers left, and make a folder that says we live."""
        private_folder(self._root, mark=f"{_PREFIX}*")
        with _alone(self._root):  # a folder that is made but not locked yet looks abandoned
            self.swept = _swept(self._root)
            self._folder = _fresh(_PREFIX, self._root)
            private_file(self._folder / _LOCK)
            self._lock_fd = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def close(self) -> None:
        """Remove this boot's folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock_fd)
            self._folder = None

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[Path]:
        """A fresh folder, gone afterwards however the attempt ended."""
        folder = _fresh("attempt-", self.folder)
        try:
            yield folder
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    def free_bytes(self) -> int:
        """What is free on the disk for us."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def total_bytes(self) -> int:
        """How large the disk is."""
        found = os.statvfs(self.folder)
        return found.f_blocks * found.f_frsize


def sweep(root: Path) -> list[str]:
    """Remove what workers left that were killed; the names of the folders that are gone."""
    if not os.path.lexists(root):
        return []
    private_folder(root, mark=f"{_PREFIX}*")
    with _alone(root):
        return _swept(root)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """No other worker makes or sweeps folders here meanwhile."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _fresh(prefix: str, parent: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    folder.chmod(0o700)  # a umask may take the owner's rights too
    return folder


def _swept(root: Path) -> list[str]:
    gone = []
    for folder in root.glob(f"{_PREFIX}*"):
        if folder.is_symlink():
            folder.unlink()  # no worker made it, and what it points to is not ours to remove
        elif not _is_held(folder):
            shutil.rmtree(folder, ignore_errors=True)
            gone.append(folder.name)
    return gone


def _is_held(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
    return False
