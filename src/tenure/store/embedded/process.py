"""A server as a child process: its data folder, how it starts, becomes ready and ends.

The kernel signals a child when the *thread* that started it ends. A child started from a pool's
thread would be killed with the pool, so one thread that lives as long as the process starts all
children.
"""

from __future__ import annotations

import abc
import atexit
import fcntl
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar

from tenure.core.errors import Conflict, StoreUnreachable, UsageError
from tenure.store.files import open_private, private_file, private_folder

_LAUNCHER = Path(__file__).with_name("launch.py")
_LOCK = "tenure.lock"
_LOCK_PATIENCE_S = 5.0
_LOG_TAIL_LINES = 12
_READY_WITHIN_S = 60.0  # includes loading an append-only file, or recovery after a crash
_ENDS_WITHIN_S = 20.0
_POLL_EVERY_S = 0.02
_PORT_ATTEMPTS = 5
_PORT_MIN, _PORT_MAX = 15_000, 32_000


@dataclass(frozen=True, slots=True)
class User:
    """The user to run a child as, if it must not run as root."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Command:
    """What to execute, as which user, and the signal for a clean shutdown."""

    argv: Sequence[str]
    ends_by: signal.Signals
    user: User | None = None
    env: Mapping[str, str] | None = None


class DataFolder:
    """The folder at `path`, or a temporary one that exists while it is locked.

    The lock is an open file that the server inherits. So it lasts until this process *and* its
    server have ended, and a successor waits while the old server still writes. `owner` is another
    user who may own the folder: the one that the server runs as.
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
        """Take the lock; returns its descriptor. Conflict if another process has it."""
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
        """Release the lock; removes a temporary folder."""
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
    """Try for a while, because the server of a parent that just died may still be writing."""
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

    A subclass says what to run and when it is ready. The methods block.
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
        """Its TCP address, the same after a restart."""

    @abc.abstractmethod
    def _prepare(self, port: int) -> Command:
        """Prepare the folder; returns what to run."""

    @abc.abstractmethod
    def _is_ready(self, port: int, pid: int) -> bool:
        """Whether the process `pid` answers; another server may have taken the port."""

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
        """Where its data and its log are."""
        return self._folder.path

    def start(self) -> str:
        """Start the server unless it runs, and wait until it answers; returns its URL."""
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
        """Shut the server down if it runs, and start it with the same data and port."""
        self._end()
        return self.start()

    def stop(self) -> None:
        """Shut the server down and release the folder; removes a temporary one."""
        with self._guard:
            if self._owner_pid == os.getpid():
                self._end()
                self._release()

    def kill(self) -> None:
        """Send SIGKILL, and return when the server has ended. The folder stays locked."""
        with self._guard:
            process = self._process
            if process is None or self._owner_pid != os.getpid():
                return
            orphans = _children(process.pid)
            process.kill()
            process.wait()
            self._process = None
            _wait_until_gone(orphans)

    def _end(self, by: signal.Signals | None = None) -> None:
        """End the server by its shutdown signal or by `by`; the folder stays locked."""
        with self._guard:
            process, command = self._process, self._command
            if process is None or command is None or self._owner_pid != os.getpid():
                return  # this is a forked copy of the process that started it
            if process.poll() is None:
                process.send_signal(by or command.ends_by)
            try:
                process.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def _release(self) -> None:
        atexit.unregister(self.stop)
        self._folder.unlock()
        self._owner_pid = 0

    def _start_on_a_port(self, lock_fd: int) -> None:
        """Start on the known port, or on a free one; another program may take it first."""
        if self._port is not None:  # given by the caller, or known to clients already
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
        folder.log.unlink(missing_ok=True)  # so that its last lines explain a failed start
        self._process = process = spawn(
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


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    dies_by: signal.Signals,
    user: User | None = None,
    keep_open: Sequence[int] = (),
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` in its own session; it gets the signal `dies_by` if this process dies."""
    argv = tied(command, dies_by=dies_by, user=user)

    def start() -> subprocess.Popen[bytes]:
        private_file(log)
        with log.open("ab") as output:
            return subprocess.Popen(  # nosec B603 # the command is ours
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=tuple(keep_open),
                start_new_session=True,  # Ctrl-C must not reach it: we stop it ourselves
                cwd=cwd,
                env=env,
                umask=0o077,
            )

    return _in_spawner(start)


def tied(command: Sequence[str], *, dies_by: signal.Signals, user: User | None = None) -> list[str]:
    """The command line that runs `command` and ends it with the thread that starts it."""
    identity = (str(user.uid), str(user.gid)) if user else ("-", "-")
    launcher = (sys.executable, "-I", "-S", str(_LAUNCHER))
    return [*launcher, str(os.getpid()), str(int(dies_by)), *identity, "--", *command]


_Started = subprocess.Popen[bytes]
_StartQueue = SimpleQueue[tuple[Callable[[], _Started], Future[_Started]]]
_spawner_lock = threading.Lock()


def _in_spawner(start: Callable[[], _Started]) -> _Started:
    with _spawner_lock:
        queue = _spawner_queue(os.getpid())
    result: Future[_Started] = Future()
    queue.put((start, result))
    return result.result()


@functools.lru_cache(maxsize=1)
def _spawner_queue(_pid: int) -> _StartQueue:
    """The queue of the thread that starts children; a forked process has its own."""
    queue: _StartQueue = SimpleQueue()

    def run() -> None:
        while True:
            start, result = queue.get()
            try:
                result.set_result(start())
            except BaseException as error:
                result.set_exception(error)

    # A daemon, so that it outlives the atexit handlers, which stop the servers.
    threading.Thread(target=run, name="tenure-spawner", daemon=True).start()
    return queue


def _free_port() -> int:
    """A free port below the kernel's range for outgoing connections.

    With a port of that range, a client that retries while the server is down could be given the
    server's port as its source port. It would connect to itself, and the server could not start.
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


def _children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _wait_until_gone(pids: Sequence[int], patience_s: float = 10.0) -> None:
    """Wait for the children of a killed server: a new server must not run beside them."""
    deadline_s = time.monotonic() + patience_s
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(_POLL_EVERY_S)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
