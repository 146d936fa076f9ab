"""A fair lock between processes: whoever lets go cannot take it again before those who wait.

A writer first takes the place in front (`next`), then the lock itself, then leaves the place. One
that just let go finds the place taken. SQLite's own lock has no such order: with four writers one
of them may wait for seconds. The kernel frees both when a process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from types import TracebackType

from tenure.store.private import private_file

NEXT, LOCK = "-next", "-lock"
"""What the names of the files of the place in front and of the lock itself end with."""


class Turnstile:
    """Used as `with turnstile:` by one thread; waits without using the processor."""

    def __init__(self, path: Path) -> None:
        self._next = _open(path.with_name(path.name + NEXT))
        self._lock = _open(path.with_name(path.name + LOCK))

    def __enter__(self) -> None:
        fcntl.flock(self._next, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def tell(self) -> None:
        """Write to the file of the place in front, for those who watch it.

        A full disk takes no byte. They look by their own clocks too, and what was committed before
        must not be told as failed.
        """
        with contextlib.suppress(OSError):
            os.pwrite(self._next, b"\0", 0)

    def close(self) -> None:
        """Give the files back."""
        os.close(self._next)
        os.close(self._lock)


def _open(path: Path) -> int:
    private_file(path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
