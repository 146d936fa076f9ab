"""A server as a child process: started, watched until it is ready, ended by its own pid.

What differs between servers is a small `Recipe`; the life of the child is here, once.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tenure.core.errors import StoreUnreachable, UsageError
from tenure.store.embedded.folder import DataFolder
from tenure.store.embedded.spawn import User, spawn

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
