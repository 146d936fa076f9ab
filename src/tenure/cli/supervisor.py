"""Child processes that are kept running: for `tenure up`, and for a worker of several processes.

Each child leads a session of its own, so that Ctrl-C in the terminal reaches the parent alone,
which stops the children in the right order. A child that is asked to stop twice hands its jobs back
at once, and one that does not end is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tenure.cli.config import child_environment, notify_address
from tenure.cli.output import Exit, Failed, note, paint

if TYPE_CHECKING:
    from tenure.worker.telemetry import Notifier

_PR_SET_PDEATHSIG = 1
_USAGE = 2
_LASTS_S = 10.0  # a child that lived this long did not die of its start
_PAUSE_S, _PAUSE_S_MAX = 0.2, 10.0
_QUICK_DEATHS_MAX = 6
_KILLED_AFTER_S = 3.0
_READY_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.05


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGTERM when the parent is gone; exit now if it already is."""
    if not parent_pid:
        return
    if sys.platform == "linux":
        import ctypes  # not above: a hardened service (MemoryDenyWriteExecute) may refuse it

        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died between our start and the call above
        raise SystemExit(1)


@contextmanager
def stopping_on_signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """Within the block the first SIGINT, SIGTERM or SIGHUP sets `stop`, the next one `hurry`."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@dataclass(slots=True)
class _Child:
    """One child, over all its restarts."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    started_s: float = 0.0
    quick_deaths: int = 0
    stopping: bool = False
    once: bool = False
    last_line: str = "it said nothing"


class Supervisor:
    """Starts children, keeps them running, and stops them one by one.

    `broken` is a future that fails when a child cannot be started.
    """

    def __init__(self, say: Callable[[str], None], environment: Mapping[str, str]) -> None:
        self._say = say
        self._environment = dict(environment)
        self._children: dict[str, _Child] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self.hurry = asyncio.Event()
        self.worst_exit = 0
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(
        self,
        name: str,
        argv: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        once: bool = False,
    ) -> None:
        """Start a child and keep it running until `stop`; with `once` it may end with code 0.

        `environment` is for this child alone. Passwords go there, since every user of the machine
        can read `argv`.
        """
        child = self._children[name] = _Child(name, argv, environment or {}, once=once)
        await self._spawn(child)
        self._watches[name] = asyncio.create_task(self._watch(child))

    def pid(self, name: str) -> int | None:
        """The child's process id while it runs."""
        child = self._children.get(name)
        process = child.process if child else None
        return process.pid if process and process.returncode is None else None

    async def until(self, stop: asyncio.Event) -> None:
        """Wait for `stop`, or until every child has ended by itself; raises if one cannot start."""
        stopped = asyncio.ensure_future(stop.wait())
        ended = asyncio.gather(*self._watches.values())
        try:
            waiting: set[asyncio.Future[Any]] = {stopped, ended, self.broken}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self.broken.done():
                self.broken.result()
        finally:
            stopped.cancel()

    async def stop(self, name: str, within_s: float) -> None:
        """SIGTERM; after `within_s` or on `hurry` a second SIGTERM; at the end SIGKILL."""
        child = self._children.pop(name, None)
        if child is None or child.process is None:
            return
        child.stopping = True
        await self._end(child.process, within_s)
        await asyncio.gather(self._watches.pop(name), return_exceptions=True)

    async def _end(self, process: asyncio.subprocess.Process, within_s: float) -> None:
        ended = asyncio.ensure_future(process.wait())
        rushed = asyncio.ensure_future(self.hurry.wait())
        try:
            _signal(process, signal.SIGTERM)
            await asyncio.wait(
                {ended, rushed}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended.done():
                _signal(process, signal.SIGTERM)
                await asyncio.wait({ended}, timeout=_KILLED_AFTER_S)
            if not ended.done():
                _signal(process, signal.SIGKILL)
            await ended
        finally:
            rushed.cancel()

    async def _spawn(self, child: _Child) -> None:
        child.started_s = time.monotonic()
        child.process = await asyncio.create_subprocess_exec(
            *child.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**self._environment, **child.environment},
            start_new_session=True,
        )

    async def _watch(self, child: _Child) -> None:
        while child.process is not None:
            await self._pump(child, child.process)
            code = await child.process.wait()
            if child.stopping and code != -signal.SIGTERM:  # one that had not begun goes at once
                self.worst_exit = max(self.worst_exit, abs(code))
            if (
                child.stopping
                or (child.once and code == 0)
                or not await self._comes_back(child, code)
            ):
                return
            await self._spawn(child)
            self._say(f"{child.name} runs again (pid {child.process.pid})")

    async def _comes_back(self, child: _Child, code: int) -> bool:
        """Say how the child ended and wait a little; False when it is not to be started again."""
        lasted = time.monotonic() - child.started_s > _LASTS_S
        child.quick_deaths = 0 if lasted else child.quick_deaths + 1
        if code == _USAGE or child.quick_deaths >= _QUICK_DEATHS_MAX:
            why = f"{child.name} does not start ({_ended(code)}): {child.last_line}"
            if not self.broken.done():
                self.broken.set_exception(Failed(Exit.ERROR, why))
            return False
        self._say(f"{child.name} {_ended(code)}: starting it again")
        await asyncio.sleep(min(_PAUSE_S * 2 ** max(child.quick_deaths - 1, 0), _PAUSE_S_MAX))
        return not child.stopping

    async def _pump(self, child: _Child, process: asyncio.subprocess.Process) -> None:
        prefix = paint(f"{child.name:>8} | ", "dim", sys.stderr)
        async for text in output_lines(process):
            child.last_line = text
            with contextlib.suppress(OSError):
                note(f"{prefix}{text}")


async def output_lines(process: asyncio.subprocess.Process) -> AsyncIterator[str]:
    """What a process writes, line by line; lines longer than the buffer are dropped."""
    while process.stdout is not None:
        try:
            line = await process.stdout.readline()
        except ValueError:
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


async def until_ready(gateway_url: str, supervisor: Supervisor, stop: asyncio.Event) -> None:
    """Wait until the gateway answers or `stop` is set; raises if a child cannot start."""
    deadline = time.monotonic() + _READY_WITHIN_S
    while not stop.is_set():
        if supervisor.broken.done():
            supervisor.broken.result()
        if await asyncio.to_thread(_is_ready, gateway_url):
            return
        if time.monotonic() > deadline:
            raise Failed(
                Exit.TIMEOUT,
                f"the gateway did not answer within {_READY_WITHIN_S:g} s; its words are above",
            )
        await asyncio.sleep(_LOOK_EVERY_S)


def _is_ready(gateway_url: str) -> bool:
    from tenure.cli.gateway_client import fetch

    try:
        return fetch(f"{gateway_url}/readyz", 2)[0] == 200
    except OSError:
        return False


async def run_workers(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], *, drain_s: float, once: bool
) -> int:
    """Run all commands until a signal, or with `once` until each has ended by itself.

    To systemd they are one service, which is ready when all children are, and the
    watchdog is fed for as long as this process, which restarts them, is alive.
    """
    from tenure.worker.telemetry import Notifier

    address, watchdog_ms = notify_address()
    notifier = Notifier(address)
    stop = asyncio.Event()
    names = [f"worker{number}" for number in range(1, len(commands) + 1)]
    with _ReadyListener(len(names), notifier) as listener:
        ours = child_environment() | {"NOTIFY_SOCKET": listener.address}
        supervisor = Supervisor(note, {**ours, **environment})
        with stopping_on_signals(stop, supervisor.hurry):
            for name, command in zip(names, commands, strict=True):
                await supervisor.start(name, [*command, "--parent", str(os.getpid())], once=once)
            watchdog = asyncio.create_task(notifier.feed_watchdog(watchdog_ms))
            try:
                await supervisor.until(stop)
            finally:
                watchdog.cancel()
                notifier.stopping()
                await asyncio.gather(*(supervisor.stop(name, drain_s + 10) for name in names))
                notifier.close()
    return supervisor.worst_exit


class _ReadyListener:
    """Receives READY from `count` children, as systemd would, and passes it on once."""

    def __init__(self, count: int, notifier: Notifier) -> None:
        self._count = count
        self._notifier = notifier
        self._ready = 0
        self.address = f"@tenure-{os.getpid()}-{secrets.token_hex(8)}"

    def __enter__(self) -> _ReadyListener:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._socket.bind("\0" + self.address[1:])
        asyncio.get_running_loop().add_reader(self._socket, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _receive(self) -> None:
        if b"READY=1" in self._socket.recv(4096):
            self._ready += 1
            if self._ready == self._count:
                self._notifier.ready(f"{self._count} worker processes")
