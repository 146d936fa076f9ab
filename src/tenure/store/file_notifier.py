"""Wake-ups between processes that share an SQLite file: named pipes, and a watch on file writes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterable
from hashlib import blake2s
from pathlib import Path

_TOUCH_S = 60.0
_STALE_S = 600.0
"""A pipe without a reader that its owner has not touched for so long belongs to a dead process."""

_TURN_NS = 50_000_000
"""For so long all notifiers prefer the same one: what comes close together is done together, and
over longer times everybody has a share."""

_STRIDE = 7_919
_number = itertools.count(1)


class Listener:
    """One who may wait for a topic, in one event loop; calls `heard` when it is woken."""

    def __init__(self, folder: Path, topic: str, heard: Callable[[], None]) -> None:
        self._path = folder / f"{_prefix(topic)}{os.getpid()}.{next(_number)}"
        self._heard = heard
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        self._touched = float("-inf")

    def open(self) -> bool:
        """From now on a notice is not missed; False where there can be no pipe."""
        if self._fd >= 0:
            self._read()
            return True
        try:
            self._fd = self._opened()
            if (now := time.monotonic()) - self._touched > _TOUCH_S:
                self._touched = now
                os.utime(self._path)
        except OSError:
            return False
        self._loop.add_reader(self._fd, self._read)
        return True

    def close(self) -> bool:
        """Stop waiting; True when a notice came that nothing was done about."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return False
        self._loop.remove_reader(fd)
        try:
            return bool(_drained(fd))
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Take the pipe away, and the folder with the last one."""
        self.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
            self._path.parent.rmdir()

    def _opened(self) -> int:
        for _ in range(3):  # another process may remove the folder or the pipe in between
            try:
                # With a writer of its own, the pipe of the last notifier's end is no end of file.
                return os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    self._path.parent.mkdir(mode=0o700)
                    self._path.parent.chmod(0o700)
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    os.mkfifo(self._path, 0o600)
                    self._path.chmod(0o600)
        raise FileNotFoundError(self._path)

    def _read(self) -> None:
        if _drained(self._fd):
            self._heard()


def notify(folder: Path, topic: str) -> bool:
    """Wake one who waits for a topic, in this process if one does; False when there is none."""
    prefix = _prefix(topic)
    own = f"{prefix}{os.getpid()}."
    try:
        names = [path.name for path in folder.iterdir() if path.name.startswith(prefix)]
    except OSError:  # the folder is made by the first who waits
        return False
    names.sort()
    first = time.monotonic_ns() // _TURN_NS * _STRIDE % max(1, len(names))
    names = names[first:] + names[:first]
    names.sort(key=lambda name: not name.startswith(own))
    return any(_written(folder / name) for name in names)


def _written(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # its owner does not wait, or is dead
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()
        return False
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode) and os.write(fd, b"\0") == 1
    except OSError:
        return False
    finally:
        os.close(fd)


def _drained(fd: int) -> bytes:
    """What the pipe holds."""
    try:
        return os.read(fd, 4096)
    except OSError:
        return b""


def _prefix(topic: str) -> str:
    return blake2s(topic.encode(), digest_size=8).hexdigest() + "."


POLL_EVERY_MS = 100

_IN_MODIFY = 0x2
_IN_CREATE = 0x100
_IN_MOVED_TO = 0x80
_HEAD = struct.Struct("iIII")


class FileWatcher:
    """Calls `changed` in the event loop after writes to one of some files in a folder."""

    def __init__(self, folder: Path, names: Iterable[str], changed: Callable[[], None]) -> None:
        self._names = frozenset(os.fsencode(name) for name in names)
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._fd = _watch(folder) if sys.platform == "linux" else -1
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._heard)

    @property
    def is_told(self) -> bool:
        """False where nobody tells and one has to look."""
        return self._fd >= 0

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _heard(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        at, found = 0, False
        while at + _HEAD.size <= len(data):
            _, _, _, length = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            found = found or data[at : at + length].rstrip(b"\0") in self._names
            at += length
        if found:
            self._changed()


def _watch(folder: Path) -> int:
    """An inotify descriptor on a folder; -1 when the machine has no more of them."""
    import ctypes  # slow to import, and not needed by who only looks once

    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        return -1
    mask = _IN_MODIFY | _IN_CREATE | _IN_MOVED_TO
    if libc.inotify_add_watch(fd, os.fsencode(folder), mask) < 0:
        os.close(fd)
        return -1
    return fd
