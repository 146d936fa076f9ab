"""Tells when files were written by any process, without asking again and again.

Linux tells by inotify; elsewhere whoever waits looks ten times a second.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

LOOK_EVERY_MS = 100

_IN_MODIFY = 0x2
_IN_CREATE = 0x100
_IN_MOVED_TO = 0x80
_HEAD = struct.Struct("iIII")


class FileWatch:
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
