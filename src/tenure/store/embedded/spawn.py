"""Starts child processes from one thread that lives as long as the process.

The kernel's "tell me when my parent dies" means the parent's *thread*. A child started from a
pool's thread would be killed when the pool or its event loop ends; so all start from this one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tenure.store.private import private_file

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
