"""A server as a child process: its data folder, its start, its readiness and its end."""

from __future__ import annotations

import atexit
import fcntl
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
from typing import Protocol

from tenure.core.errors import Conflict, StoreUnreachable, UsageError
from tenure.store.files import private_file, private_folder

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


_LAUNCHER = Path(__file__).with_name("launch.py")
_Work = tuple[Callable[[], "subprocess.Popen[bytes]"], "Future[subprocess.Popen[bytes]]"]


@dataclass(frozen=True, slots=True)
class User:
    """Whom a child becomes when it may not run as root."""

    name: str
    uid: int
    gid: int


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
    """Starts `command` in a session of its own; `dies_by` reaches it when this process dies."""
    argv = tied(command, dies_by=dies_by, user=user)
    # Its own session: Ctrl-C in the terminal goes to us, and we stop the server when we are ready.

    def start() -> subprocess.Popen[bytes]:
        private_file(log)
        with log.open("ab") as output:
            return subprocess.Popen(  # nosec B603 # the command is ours
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=tuple(keep_open),
                start_new_session=True,
                cwd=cwd,
                env=env,
                umask=0o077,
            )

    return _in_spawner(start)


def tied(command: Sequence[str], *, dies_by: signal.Signals, user: User | None = None) -> list[str]:
    """The command line that runs `command` and ends with the thread that starts it."""
    identity = (str(user.uid), str(user.gid)) if user else ("-", "-")
    launcher = (sys.executable, "-I", "-S", str(_LAUNCHER))
    return [*launcher, str(os.getpid()), str(int(dies_by)), *identity, "--", *command]


class _Spawner:
    """The thread and its queue; a forked copy of this process needs its own, hence `pid`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.work: SimpleQueue[_Work] = SimpleQueue()
        # A daemon, so that it outlives atexit handlers, which stop the servers in good order.
        threading.Thread(target=self._run, name="tenure-spawner", daemon=True).start()

    def _run(self) -> None:
        while True:
            start, result = self.work.get()
            try:
                result.set_result(start())
            except BaseException as error:
                result.set_exception(error)


_lock = threading.Lock()
_spawner: list[_Spawner] = []


def _in_spawner(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    with _lock:
        if not _spawner or _spawner[-1].pid != os.getpid():
            _spawner[:] = [_Spawner()]
        spawner = _spawner[-1]
    result: Future[subprocess.Popen[bytes]] = Future()
    spawner.work.put((start, result))
    return result.result()


_READY_WITHIN_S = 60.0  # includes loading an append-only file, or recovery after a crash
_ENDS_WITHIN_S = 20.0
_LOOK_EVERY_S = 0.02
_PORT_ATTEMPTS = 5
_PORT_MIN, _PORT_MAX = 15_000, 32_000


@dataclass(frozen=True, slots=True)
class Command:
    """What to execute, as whom, and by which signals it ends well: ours, and the kernel's."""

    argv: Sequence[str]
    ends_by: signal.Signals
    dies_by: signal.Signals
    user: User | None = None
    env: Mapping[str, str] | None = None


class Recipe(Protocol):
    """What a kind of server brings along."""

    kind: str

    def prepare(self, folder: DataFolder, port: int) -> Command: ...

    def is_ready(self, folder: DataFolder, port: int, pid: int) -> bool: ...


class ChildServer:
    """One server process and its folder; starting again keeps the data and the port."""

    def __init__(self, recipe: Recipe, folder: DataFolder, port: int | None) -> None:
        self._recipe = recipe
        self._folder = folder
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._command: Command | None = None
        self._owner = 0
        self._guard = threading.RLock()

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1."""
        if self._port is None:
            raise UsageError(f"the embedded {self._recipe.kind} has no port before start()")
        return self._port

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Starts the server unless it runs, and waits until it answers."""
        with self._guard:
            if self.pid is not None:
                return
            lock_fd = self._folder.lock()
            self._owner = os.getpid()
            atexit.register(self.stop)
            try:
                self._start_on_a_port(lock_fd)
            except BaseException:
                self.kill()
                self._release()
                raise

    def end(self, by: signal.Signals | None = None) -> None:
        """Asks the server to end, in good order unless `by` says otherwise; the folder stays."""
        with self._guard:
            process, command = self._process, self._command
            if process is None or command is None or self._owner != os.getpid():
                return  # not ours: a forked copy of us must not end our server
            if process.poll() is None:
                process.send_signal(by or command.ends_by)
            try:
                process.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def stop(self) -> None:
        """`end`, and lets go of the folder; a temporary one is removed."""
        with self._guard:
            if self._owner == os.getpid():
                self.end()
                self._release()

    def kill(self) -> None:
        """SIGKILL, as a power cut would; returns when the server is gone. The folder stays."""
        with self._guard:
            process = self._process
            if process is None or self._owner != os.getpid():
                return
            orphans = _children(process.pid)
            process.kill()
            process.wait()
            self._process = None
            _wait_until_gone(orphans)

    def _release(self) -> None:
        atexit.unregister(self.stop)
        self._folder.unlock()
        self._owner = 0

    def _start_on_a_port(self, lock_fd: int) -> None:
        """A port of our choice may be taken before the server gets there: then another one."""
        if self._port is not None:  # asked for, or known to clients since the first start
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
        self._command = command = self._recipe.prepare(folder, port)
        folder.log.unlink(missing_ok=True)  # one start, one log: its end explains a failure
        self._process = process = spawn(
            command.argv,
            log=folder.log,
            dies_by=command.dies_by,
            user=command.user,
            keep_open=[lock_fd],
            cwd=folder.path,
            env=command.env,
        )
        deadline_s = time.monotonic() + _READY_WITHIN_S
        while not self._recipe.is_ready(folder, port, process.pid):
            if process.poll() is not None:
                raise self._failed(f"ended with status {process.returncode}", command)
            if time.monotonic() > deadline_s:
                raise self._failed(f"did not answer within {_READY_WITHIN_S:.0f} s", command)
            time.sleep(_LOOK_EVERY_S)

    def _failed(self, what: str, command: Command) -> StoreUnreachable:
        return StoreUnreachable(
            f"the embedded {self._recipe.kind} {what}: {command.argv[0]} in {self._folder.path}. "
            f"The end of its log:\n{self._folder.log_tail()}"
        )


def _free_port() -> int:
    """A free port below the kernel's range for outgoing connections.

    From within that range, a client that knocks while the server is down can be given the server's
    own port as its source, connect to itself, and keep the server from coming back.
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
    """Orphans of a killed server notice its death and end; its successor must not meet them."""
    deadline_s = time.monotonic() + patience_s
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_EVERY_S)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
