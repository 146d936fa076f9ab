"""Wakes processes that share an SQLite file: one of them by a named pipe, all of them by inotify.

A pipe has a reader only while its owner waits. So a notifier cannot open the pipes of busy or dead
processes, and writes to the first pipe that it can open: one job wakes one process of many. If a
pipe or an inotify watch cannot be created, the caller has to poll.
"""

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

POLL_EVERY_MS = 100

# A pipe without a reader that its owner has not touched for `_STALE_S` belongs to a dead process.
_TOUCH_S = 60.0
_STALE_S = 600.0
# All notifiers prefer the same pipe for this long, so wake-ups close together reach one process.
# Over longer times every process gets its part of the work.
_TURN_NS = 50_000_000
_STRIDE = 7_919  # a prime: how far the preference moves along the sorted pipes with every turn
_number = itertools.count(1)


class Listener:
    """Waits for a topic in one event loop; calls `on_wake` when it is woken."""

    def __init__(self, folder: Path, topic: str, on_wake: Callable[[], None]) -> None:
        self._path = folder / f"{_prefix(topic)}{os.getpid()}.{next(_number)}"
        self._on_wake = on_wake
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        self._touched = float("-inf")

    def open(self) -> bool:
        """Start to listen: no notification is missed from now on. False if there is no pipe."""
        if self._fd >= 0:
            self._read()
            return True
        try:
            self._fd = self._open_pipe()
            if (now := time.monotonic()) - self._touched > _TOUCH_S:
                self._touched = now
                os.utime(self._path)
        except OSError:
            return False
        self._loop.add_reader(self._fd, self._read)
        return True

    def close(self) -> bool:
        """Stop listening; True if a notification arrived that `on_wake` was not called for."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return False
        self._loop.remove_reader(fd)
        try:
            return bool(_read_all(fd))
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Delete the pipe, and the folder if this was the last pipe."""
        self.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
            self._path.parent.rmdir()

    def _open_pipe(self) -> int:
        for _ in range(3):  # another process may remove the folder or the pipe in between
            try:
                # For writing too: otherwise we would read end of file when a notifier closes it.
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
        if _read_all(self._fd):
            self._on_wake()


def notify(folder: Path, topic: str) -> bool:
    """Wake one listener of a topic, in this process if there is one; False if none waits."""
    prefix = _prefix(topic)
    own = f"{prefix}{os.getpid()}."
    try:
        names = [path.name for path in folder.iterdir() if path.name.startswith(prefix)]
    except OSError:  # the first listener creates the folder
        return False
    names.sort()
    first = time.monotonic_ns() // _TURN_NS * _STRIDE % max(1, len(names))
    names = names[first:] + names[:first]
    names.sort(key=lambda name: not name.startswith(own))
    return any(_write(folder / name) for name in names)


def _write(path: Path) -> bool:
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


def _read_all(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except OSError:
        return b""


def _prefix(topic: str) -> str:
    return blake2s(topic.encode(), digest_size=8).hexdigest() + "."


_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100
_INOTIFY_EVENT = struct.Struct("iIII")


class FileWatcher:
    """Calls `changed` in the event loop after writes to the named files of a folder."""

    def __init__(self, folder: Path, names: Iterable[str], changed: Callable[[], None]) -> None:
        self._names = frozenset(os.fsencode(name) for name in names)
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._fd = _inotify(folder) if sys.platform == "linux" else -1
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._read)

    @property
    def is_active(self) -> bool:
        """False without inotify; the caller has to poll."""
        return self._fd >= 0

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        at, found = 0, False
        while at + _INOTIFY_EVENT.size <= len(data):
            _, _, _, length = _INOTIFY_EVENT.unpack_from(data, at)
            at += _INOTIFY_EVENT.size
            found = found or data[at : at + length].rstrip(b"\0") in self._names
            at += length
        if found:
            self._changed()


def _inotify(folder: Path) -> int:
    """An inotify descriptor for a folder; -1 if the user's limit is reached."""
    import ctypes  # slow to import, and many processes never watch

    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        return -1
    mask = _IN_MODIFY | _IN_CREATE | _IN_MOVED_TO
    if libc.inotify_add_watch(fd, os.fsencode(folder), mask) < 0:
        os.close(fd)
        return -1
    return fd
