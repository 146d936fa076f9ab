"""Child processes that are kept running, and what a child does about its parent."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tenure.cli.config import child_environment, notify_address
from tenure.cli.output import Exit, Failed, note, paint
from tenure.worker.notify import Notifier

_PR_SET_PDEATHSIG = 1


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
    """Within the block SIGINT, SIGTERM and SIGHUP set `stop`, and then `hurry`."""
    loop = asyncio.get_running_loop()

    def press() -> None:
        (hurry if stop.is_set() else stop).set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, press)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


_USAGE = 2
_LASTS_S = 10.0  # a child that lived this long did not die of its start
_PAUSE_S, _PAUSE_S_MAX = 0.2, 10.0
_QUICK_DEATHS_MAX = 6
_KILLED_AFTER_S = 3.0


@dataclass(slots=True)
class Part:
    """One child, over all its restarts."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    started_s: float = 0.0
    restarts: int = 0
    quick_deaths: int = 0
    stopping: bool = False
    once: bool = False
    last_words: list[str] = field(default_factory=list)


class Supervisor:
    """Starts parts, keeps them running, and stops them one by one."""

    def __init__(
        self,
        say: Callable[[str], None],
        environment: Mapping[str, str],
        paint: Callable[[str], str],
    ) -> None:
        self._say = say
        self._environment = dict(environment)
        self._paint = paint
        self._parts: dict[str, Part] = {}
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
        """Start a part and keep it running until `stop`; with `once` it may end well by itself.

        `environment` is of this part alone. What may hold a password goes there: every user of the
        machine can read `argv`.
        """
        part = self._parts[name] = Part(name, argv, environment or {}, once=once)
        await self._spawn(part)
        self._watches[name] = asyncio.create_task(self._watch(part))

    def pid(self, name: str) -> int | None:
        """The part's process id while it runs."""
        part = self._parts.get(name)
        running = part is not None and part.process is not None and part.process.returncode is None
        return part.process.pid if part and part.process and running else None

    async def until(self, stop: asyncio.Event) -> None:
        """Wait for `stop`, or until every part has ended by itself; raises if one cannot start."""
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
        """SIGTERM and patience; when `hurry` is set a second SIGTERM, and SIGKILL at the end."""
        part = self._parts.pop(name, None)
        if part is None or part.process is None:
            return
        part.stopping = True
        await self._end(part.process, within_s)
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

    async def _spawn(self, part: Part) -> None:
        part.started_s = time.monotonic()
        part.process = await asyncio.create_subprocess_exec(
            *part.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**self._environment, **part.environment},
            start_new_session=True,
        )

    async def _watch(self, part: Part) -> None:
        while part.process is not None:
            await self._pump(part, part.process)
            code = await part.process.wait()
            if part.stopping and code != -signal.SIGTERM:  # one that had not begun goes at once
                self.worst_exit = max(self.worst_exit, abs(code))
            if part.stopping or (part.once and code == 0) or not await self._comes_back(part, code):
                return
            await self._spawn(part)
            part.restarts += 1
            self._say(f"{part.name} runs again (pid {part.process.pid})")

    async def _comes_back(self, part: Part, code: int) -> bool:
        """Say how the part ended and wait a little; False when it is no use."""
        lasted = time.monotonic() - part.started_s > _LASTS_S
        part.quick_deaths = 0 if lasted else part.quick_deaths + 1
        if code == _USAGE or part.quick_deaths >= _QUICK_DEATHS_MAX:
            words = part.last_words[-1] if part.last_words else "it said nothing"
            why = f"{part.name} does not start ({_ended(code)}): {words}"
            if not self.broken.done():
                self.broken.set_exception(Failed(Exit.ERROR, why))
            return False
        self._say(f"{part.name} {_ended(code)}: starting it again")
        await asyncio.sleep(min(_PAUSE_S * 2 ** max(part.quick_deaths - 1, 0), _PAUSE_S_MAX))
        return not part.stopping

    async def _pump(self, part: Part, process: asyncio.subprocess.Process) -> None:
        prefix = self._paint(f"{part.name:>8} | ")
        while process.stdout is not None:
            try:
                line = await process.stdout.readline()
            except ValueError:  # a line longer than the buffer: its pieces are lost, not the pump
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            part.last_words = [*part.last_words[-9:], text]
            with contextlib.suppress(OSError):
                note(f"{prefix}{text}")


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


_READY_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.05


async def until_ready(gateway_url: str, supervisor: Supervisor, stop: asyncio.Event) -> None:
    """Return when it answers or `stop` is set; raises when a part cannot start, or in the end."""
    deadline = time.monotonic() + _READY_WITHIN_S
    while not stop.is_set():
        if supervisor.broken.done():
            supervisor.broken.result()
        if await asyncio.to_thread(_answers, gateway_url):
            return
        if time.monotonic() > deadline:
            raise Failed(
                Exit.TIMEOUT,
                f"the gateway did not answer within {_READY_WITHIN_S:g} s; its words are above",
            )
        await asyncio.sleep(_LOOK_EVERY_S)


def _answers(gateway_url: str) -> bool:
    parts = urlsplit(gateway_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=2)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def run_workers(
    commands: Sequence[Sequence[str]], seen: Mapping[str, str], *, drain_s: float, once: bool
) -> int:
    """Run all commands until a signal, or with `once` until each has ended by itself.

    `seen` is what they see in their environment beside ours.
    """
    return asyncio.run(_run_workers(commands, seen, drain_s, once))


async def _run_workers(
    commands: Sequence[Sequence[str]], seen: Mapping[str, str], drain_s: float, once: bool
) -> int:
    address, watchdog_ms = notify_address()
    notifier = Notifier(address)
    stop = asyncio.Event()
    names = [f"worker{number}" for number in range(1, len(commands) + 1)]
    with ReadyListener(len(names), notifier) as ear:
        environment = child_environment() | {"NOTIFY_SOCKET": ear.address, **seen}
        supervisor = Supervisor(note, environment, lambda text: paint(text, "dim", sys.stderr))
        with stopping_on_signals(stop, supervisor.hurry):
            for name, command in zip(names, commands, strict=True):
                await supervisor.start(name, [*command, "--parent", str(os.getpid())], once=once)
            beating = asyncio.create_task(_beat(notifier, watchdog_ms))
            try:
                await supervisor.until(stop)
            finally:
                beating.cancel()
                notifier.stopping()
                await asyncio.gather(*(supervisor.stop(name, drain_s + 10) for name in names))
                notifier.close()
    return supervisor.worst_exit


class ReadyListener:
    """Hears READY from `count` children, as systemd would, and passes it on once."""

    def __init__(self, count: int, notifier: Notifier) -> None:
        self._count = count
        self._notifier = notifier
        self._ready = 0
        self.address = f"@tenure-{os.getpid()}-{secrets.token_hex(8)}"

    def __enter__(self) -> ReadyListener:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._socket.bind("\0" + self.address[1:])
        asyncio.get_running_loop().add_reader(self._socket, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _heard(self) -> None:
        if b"READY=1" in self._socket.recv(4096):
            self._ready += 1
            if self._ready == self._count:
                self._notifier.ready(f"{self._count} worker processes")


async def _beat(notifier: Notifier, watchdog_ms: int) -> None:
    while watchdog_ms:
        notifier.watchdog()
        await asyncio.sleep(watchdog_ms / 2000)
