"""Child processes: start them, read their output within bounds, keep them running, end them.

Every child leads a session of its own. Ctrl-C in a terminal therefore reaches only this process,
and a signal to the child's process group also reaches what the child started.

`launch.py` binds a child to its parent: the kernel signals the child when the parent dies. The
kernel watches the parent's *thread*, not its process. A bound child must be started from a thread
that lives as long as the process: the main thread, or the one behind `spawn`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from tenure.core.errors import TenureError

_LAUNCHER = Path(__file__).with_name("launch.py")
_POLL_EVERY_S = 0.02
_ORPHANS_GONE_WITHIN_S = 10.0
_READ_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class User:
    """The user that a child becomes when it must not run as root."""

    name: str
    uid: int
    gid: int


def bound_to_parent(
    command: Sequence[str], *, dies_by: signal.Signals, user: User | None = None
) -> list[str]:
    """The command line that runs `command` and signals it when the starting thread ends."""
    identity = (str(user.uid), str(user.gid)) if user else ("-", "-")
    launcher = (sys.executable, "-I", "-S", str(_LAUNCHER))
    return [*launcher, str(os.getpid()), str(int(dies_by)), *identity, "--", *command]


def describe_exit(code: int) -> str:
    """How a child ended.

    >>> describe_exit(3), describe_exit(-9)
    ('ended with exit code 3', 'was ended by SIGKILL')
    """
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def signal_group(pid: int, number: signal.Signals) -> None:
    """Signal a child and everything that it started, as far as any of it still runs."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


# Blocking children.


def popen(
    argv: Sequence[str],
    *,
    output: IO[bytes] | None = None,
    keep_open: Sequence[int] = (),
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a child without input; its output goes to `output`, else to ours."""
    return subprocess.Popen(  # nosec B603 # the command is ours
        argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        pass_fds=tuple(keep_open),
        start_new_session=True,
        **options,
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
    """Start a bound child from any thread; its output is appended to `log`."""
    argv = bound_to_parent(command, dies_by=dies_by, user=user)

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return popen(argv, output=output, keep_open=keep_open, cwd=cwd, env=env, umask=0o077)

    with _spawner_lock:
        queue = _spawner_queue(os.getpid())
    result: Future[subprocess.Popen[bytes]] = Future()
    queue.put((start, result))
    return result.result()


_Start = tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]]
_spawner_lock = threading.Lock()


@functools.lru_cache(maxsize=1)
def _spawner_queue(_pid: int) -> SimpleQueue[_Start]:
    """The queue of the thread that starts bound children; a forked process gets its own."""
    queue: SimpleQueue[_Start] = SimpleQueue()

    def run() -> None:
        while True:
            start, result = queue.get()
            try:
                result.set_result(start())
            except BaseException as error:
                result.set_exception(error)

    # A daemon thread outlives atexit handlers, which stop servers in good order.
    threading.Thread(target=run, name="tenure-spawner", daemon=True).start()
    return queue


def stop(process: subprocess.Popen[bytes], *, by: signal.Signals, within_s: float) -> None:
    """Send `by` and wait; kill the child if it still runs after `within_s`."""
    if process.poll() is None:
        process.send_signal(by)
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL; returns when the child and its own children are gone.

    The children of a killed server end by themselves, but its successor must not run beside them.
    """
    orphans = _children(process.pid)
    process.kill()
    process.wait()
    deadline_s = time.monotonic() + _ORPHANS_GONE_WITHIN_S
    while any(_runs(pid) for pid in orphans) and time.monotonic() < deadline_s:
        time.sleep(_POLL_EVERY_S)


def _children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Children of an event loop, whose output we read.


async def start(
    command: Sequence[str],
    *,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    separate_stderr: bool = False,
) -> asyncio.subprocess.Process:
    """Start a child without input; `stdout` also carries its stderr unless that is separate."""
    pipe, merged = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe if separate_stderr else merged,
        cwd=cwd,
        env=env,
        start_new_session=True,
    )


@asynccontextmanager
async def running(
    command: Sequence[str], *, grace_s: float = 0.0, **options: Any
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child that ends with the block, and with it everything that it started.

    If the child still runs at the end of the block it gets SIGTERM and `grace_s` to end by itself.
    """
    process = await start(command, **options)
    try:
        yield process
    finally:
        patience_s = grace_s if process.returncode is None else 0.0
        signal_group(process.pid, signal.SIGTERM if patience_s else signal.SIGKILL)
        await asyncio.shield(_reap(process, patience_s))


async def _reap(process: asyncio.subprocess.Process, patience_s: float) -> None:
    if patience_s:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), patience_s)
        signal_group(process.pid, signal.SIGKILL)
    await process.wait()


async def read_lines(stream: asyncio.StreamReader | None) -> AsyncIterator[str]:
    """The lines of an output; lines over 64 KiB, the size of the buffer, are dropped."""
    while stream is not None:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip()


async def read_head(stream: asyncio.StreamReader | None, bytes_max: int) -> tuple[bytes, bool]:
    """The first bytes of an output, and whether there were more.

    The rest is read and dropped, because a full pipe would stop the child.
    """
    kept, cut = bytearray(), False
    while stream is not None and (chunk := await stream.read(_READ_BYTES)):
        room = bytes_max - len(kept)
        cut = cut or len(chunk) > room
        kept += chunk[: max(room, 0)]
    return bytes(kept), cut


async def read_tail(stream: asyncio.StreamReader | None, bytes_max: int) -> bytes:
    """The last bytes of an output."""
    kept = b""
    while stream is not None and (chunk := await stream.read(_READ_BYTES)):
        kept = (kept + chunk)[-bytes_max:]
    return kept


# Children that are kept running.

_USAGE = 2
_LASTS_S = 10.0  # a child that lived this long did not die of its start
_PAUSE_S, _PAUSE_S_MAX = 0.2, 10.0
_QUICK_DEATHS_MAX = 6
_KILLED_AFTER_S = 3.0


@contextmanager
def stop_on_signals(stop: asyncio.Event, stop_now: asyncio.Event) -> Iterator[None]:
    """Within the block the first SIGINT, SIGTERM or SIGHUP sets `stop`, the next one `stop_now`."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class ChildFailed(TenureError):
    """A supervised child cannot be started."""


@dataclass(slots=True)
class _Child:
    """One supervised child, over all its restarts."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    started_s: float = 0.0
    quick_deaths: int = 0
    stopping: bool = False
    once: bool = False
    last_line: str = "it printed nothing"


class Supervisor:
    """Starts children, restarts those that die, and stops them one by one.

    Children get SIGTERM when this process dies. `say` gets a sentence about each restart, `on_line`
    the name of a child and a line of its output. `broken` is a future that fails when a child
    cannot be started. While `stop_now` is set, `stop` sends the second SIGTERM at once.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        environment: Mapping[str, str],
        on_line: Callable[[str, str], None],
    ) -> None:
        self._say = say
        self._environment = dict(environment)
        self._on_line = on_line
        self._children: dict[str, _Child] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self.stop_now = asyncio.Event()
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
        """SIGTERM; after `within_s` or on `stop_now` a second SIGTERM; at the end SIGKILL.

        The signals go to the child alone, which ends its own children. A worker that gets SIGTERM
        twice hands its jobs back at once.
        """
        child = self._children.pop(name, None)
        if child is None or child.process is None:
            return
        child.stopping = True
        await self._end(child.process, within_s)
        await asyncio.gather(self._watches.pop(name), return_exceptions=True)

    async def _end(self, process: asyncio.subprocess.Process, within_s: float) -> None:
        ended = asyncio.ensure_future(process.wait())
        stopped_now = asyncio.ensure_future(self.stop_now.wait())
        try:
            _send(process, signal.SIGTERM)
            await asyncio.wait(
                {ended, stopped_now}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended.done():
                _send(process, signal.SIGTERM)
                await asyncio.wait({ended}, timeout=_KILLED_AFTER_S)
            if not ended.done():
                _send(process, signal.SIGKILL)
            await ended
        finally:
            stopped_now.cancel()

    async def _spawn(self, child: _Child) -> None:
        child.started_s = time.monotonic()
        environment = {**self._environment, **child.environment}
        child.process = await start(
            bound_to_parent(child.argv, dies_by=signal.SIGTERM), env=environment
        )

    async def _watch(self, child: _Child) -> None:
        while child.process is not None:
            async for line in read_lines(child.process.stdout):
                child.last_line = line
                with contextlib.suppress(OSError):
                    self._on_line(child.name, line)
            code = await child.process.wait()
            # SIGTERM ends a child that has not installed its handler yet. That is a clean end.
            if child.stopping and code != -signal.SIGTERM:
                self.worst_exit = max(self.worst_exit, abs(code))
            if child.stopping or (child.once and code == 0):
                return
            if not await self._may_restart(child, code):
                return
            await self._spawn(child)
            self._say(f"{child.name} runs again (pid {child.process.pid})")

    async def _may_restart(self, child: _Child, code: int) -> bool:
        """Say how the child ended and wait a little; False if it is not to be started again."""
        lasted = time.monotonic() - child.started_s > _LASTS_S
        child.quick_deaths = 0 if lasted else child.quick_deaths + 1
        if code == _USAGE or child.quick_deaths >= _QUICK_DEATHS_MAX:
            why = f"{child.name} does not start ({describe_exit(code)}): {child.last_line}"
            if not self.broken.done():
                self.broken.set_exception(ChildFailed(why))
            return False
        self._say(f"{child.name} {describe_exit(code)}: starting it again")
        await asyncio.sleep(min(_PAUSE_S * 2 ** max(child.quick_deaths - 1, 0), _PAUSE_S_MAX))
        return not child.stopping


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
