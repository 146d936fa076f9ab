"""The data folder of an embedded server: made when missing, and locked while anybody uses it.

The lock is held through an open file that the server inherits. So it lasts until this process *and*
its server are gone: a successor that comes while the old server still writes has to wait.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from tenure.core.errors import Conflict, UsageError
from tenure.store.private import private_file, private_folder

_LOCK = "tenure.lock"
_LOCK_PATIENCE_S = 5.0
_LOG_TAIL_LINES = 12


class DataFolder:
    """The folder at `path`, or a temporary one that exists while it is locked.

    `owner` is the user who may own it besides us: the one that the server becomes.
    """

    def __init__(self, path: Path | None, kind: str, owner: int | None = None) -> None:
        self.temporary = path is None
        self._kind = kind
        self._owner = owner
        self._path = path.expanduser().absolute() if path is not None else None
        self._lock_fd: int | None = None

    @property
    def path(self) -> Path:
        """Where the server keeps its data."""
        if self._path is None:
            raise UsageError(f"the embedded {self._kind} has no data folder before start()")
        return self._path

    @property
    def log(self) -> Path:
        """What the server prints."""
        return self.path / "server.log"

    def lock(self) -> int:
        """Takes the lock and returns the file that holds it; Conflict when somebody else has it."""
        if self._lock_fd is not None:
            return self._lock_fd
        if self._path is None:
            self._path = Path(tempfile.mkdtemp(prefix=f"tenure-{self._kind.lower()}-"))
        private_folder(self._path, mark=_LOCK, owner=self._owner)
        private_file(self._path / _LOCK)
        fd = os.open(self._path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        if not _locked(fd):
            holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise Conflict(
                f"{self._path} is in use by process {holder}; stop it or choose another data folder"
            )
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = fd
        return fd

    def unlock(self) -> None:
        """Lets go of the lock; a temporary folder is removed."""
        if self._lock_fd is None:
            return
        os.close(self._lock_fd)
        self._lock_fd = None
        if self.temporary and self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None

    def log_tail(self) -> str:
        """The last lines of the server's log, for an error message."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return "\n".join(f"  | {line}" for line in lines[-_LOG_TAIL_LINES:]) or "  | (empty)"


def _locked(fd: int) -> bool:
    """Tries for a while: the server of a parent that just died may still be writing its last."""
    deadline_s = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
        else:
            return True
