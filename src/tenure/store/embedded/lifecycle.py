"""An embedded server as a child process: its data folder, its start, its readiness and its end."""

from __future__ import annotations

import abc
import atexit
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tenure.core import process as child
from tenure.core.errors import Conflict, StoreUnreachable, UsageError
from tenure.store.files import open_private, private_file, private_folder

_LOCK = "tenure.lock"
_LOCK_PATIENCE_S = 5.0
_LOG_TAIL_LINES = 12
_READY_WITHIN_S = 60.0  # includes loading an append-only file, or recovery after a crash
_ENDS_WITHIN_S = 20.0
_POLL_EVERY_S = 0.02
_PORT_ATTEMPTS = 5
_PORT_MIN, _PORT_MAX = 15_000, 32_000


@dataclass(frozen=True, slots=True)
class Command:
    """What to execute, as which user, and the signal that asks it to end."""

    argv: Sequence[str]
    ends_by: signal.Signals
    user: child.User | None = None
    env: Mapping[str, str] | None = None


class DataFolder:
    """The folder at `path`, or a temporary one that exists while it is locked.

    The lock is an open file that the server inherits. It lasts until this process *and* its server
    are gone, so a successor waits while the old server still writes. Besides us, only `owner` may
    own the folder: the user that the server becomes.
    """

    def __init__(self, path: Path | None, kind: str, owner: int | None = None) -> None:
        self._temporary = path is None
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
        """The server's output."""
        return self.path / "server.log"

    def lock(self) -> int:
        """Take the lock and return its descriptor; raises `Conflict` if another process has it."""
        if self._lock_fd is not None:
            return self._lock_fd
        if self._path is None:
            self._path = Path(tempfile.mkdtemp(prefix=f"tenure-{self._kind.lower()}-"))
        private_folder(self._path, mark=_LOCK, owner=self._owner)
        fd = open_private(self._path / _LOCK)
        if not _try_lock(fd):
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
        """Release the lock; a temporary folder is removed."""
        if self._lock_fd is None:
            return
        os.close(self._lock_fd)
        self._lock_fd = None
        if self._temporary and self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None

    def log_tail(self) -> str:
        """The last lines of the server's log, for an error message."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return "\n".join(f"  | {line}" for line in lines[-_LOG_TAIL_LINES:]) or "  | (empty)"


def _try_lock(fd: int) -> bool:
    """Try for a while: the server of a parent that just died may still be writing."""
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


class EmbeddedServer(abc.ABC):
    """One server process and its folder; a restart keeps the data and the port.

    A subclass defines what to run and when it is ready. The methods block.
    """

    kind: ClassVar[str]

    def __init__(
        self, data_dir: Path | None, port: int | None = None, owner: int | None = None
    ) -> None:
        self._folder = DataFolder(data_dir, self.kind, owner)
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._command: Command | None = None
        self._owner_pid = 0
        self._guard = threading.RLock()

    @property
    @abc.abstractmethod
    def url(self) -> str:
        """The URL over TCP; it stays the same after a restart."""

    @abc.abstractmethod
    def _prepare(self, port: int) -> Command:
        """Prepare the folder and return what to run."""

    @abc.abstractmethod
    def _is_ready(self, port: int, pid: int) -> bool:
        """Whether the process `pid` answers: another server may have taken the port."""

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1."""
        if self._port is None:
            raise UsageError(f"the embedded {self.kind} has no port before start()")
        return self._port

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def data_dir(self) -> Path:
        """The folder of its data and its log."""
        return self._folder.path

    def start(self) -> str:
        """Start the server unless it runs, wait until it answers, and return its URL."""
        with self._guard:
            if self.pid is None:
                lock_fd = self._folder.lock()
                self._owner_pid = os.getpid()
                atexit.register(self.stop)
                try:
                    self._start_on_a_port(lock_fd)
                except BaseException:
                    self.kill()
                    self._release()
                    raise
            return self.url

    def restart(self) -> str:
        """Stop the server if it runs, and start it on the same data and port."""
        self._end()
        return self.start()

    def stop(self) -> None:
        """Stop the server and release the folder; a temporary folder is removed."""
        with self._guard:
            if self._owner_pid == os.getpid():
                self._end()
                self._release()

    def kill(self) -> None:
        """SIGKILL, like a power cut; returns when the server is gone. The folder stays."""
        with self._guard:
            process = self._process
            if process is None or self._owner_pid != os.getpid():
                return
            child.kill(process)
            self._process = None

    def _end(self, by: signal.Signals | None = None) -> None:
        """Stop the server by its usual signal, or `by` another one; the folder stays."""
        with self._guard:
            process, command = self._process, self._command
            if process is None or command is None or self._owner_pid != os.getpid():
                return  # a forked copy of this process must not stop the server
            child.stop(process, by=by or command.ends_by, within_s=_ENDS_WITHIN_S)
            self._process = None

    def _release(self) -> None:
        atexit.unregister(self.stop)
        self._folder.unlock()
        self._owner_pid = 0

    def _start_on_a_port(self, lock_fd: int) -> None:
        """Start on the known port, else on a free one; another process may take that one first."""
        if self._port is not None:  # requested, or known to clients since the first start
            self._start_on(self._port, lock_fd)
            return
        for attempt in range(_PORT_ATTEMPTS):
            port = _free_port()
            try:
                self._start_on(port, lock_fd)
            except StoreUnreachable as error:
                if attempt + 1 == _PORT_ATTEMPTS or "in use" not in str(error):
                    raise
            else:
                self._port = port
                return

    def _start_on(self, port: int, lock_fd: int) -> None:
        folder = self._folder
        self._command = command = self._prepare(port)
        folder.log.unlink(missing_ok=True)  # a log per start, so that its end explains a failure
        private_file(folder.log)
        self._process = process = child.spawn(
            command.argv,
            log=folder.log,
            dies_by=command.ends_by,
            user=command.user,
            keep_open=[lock_fd],
            cwd=folder.path,
            env=command.env,
        )
        deadline_s = time.monotonic() + _READY_WITHIN_S
        while not self._is_ready(port, process.pid):
            if process.poll() is not None:
                raise self._failed(f"ended with status {process.returncode}", command)
            if time.monotonic() > deadline_s:
                raise self._failed(f"did not answer within {_READY_WITHIN_S:.0f} s", command)
            time.sleep(_POLL_EVERY_S)

    def _failed(self, what: str, command: Command) -> StoreUnreachable:
        return StoreUnreachable(
            f"the embedded {self.kind} {what}: {command.argv[0]} in {self._folder.path}. "
            f"The end of its log:\n{self._folder.log_tail()}"
        )


def _free_port() -> int:
    """A free port below the kernel's range for outgoing connections.

    Within that range, the kernel may give a client that retries while the server is down the
    server's own port as its source. The client then connects to itself, and the server cannot bind.
    """
    for _ in range(1000):
        port = random.randrange(_PORT_MIN, _PORT_MAX)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise StoreUnreachable(f"no free TCP port between {_PORT_MIN} and {_PORT_MAX} on 127.0.0.1")
