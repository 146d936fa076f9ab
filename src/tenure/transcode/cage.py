"""Runs ffmpeg confined: the attempt's folder, resource limits, output lines, the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import structlog

from tenure.core.errors import UsageError
from tenure.store.files import private_file, private_folder

_PREFIX = "boot-"
_LOCK = ".lock"


class Workspace:
    """The folder of this boot. `open` sweeps first."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder: Path | None = None
        self._lock_fd = -1
        self.swept: list[str] = []

    @property
    def folder(self) -> Path:
        """This boot's own folder."""
        if self._folder is None:
            raise UsageError("the workspace has not been opened")
        return self._folder

    def open(self) -> Workspace:
        """Remove what dead workers left, and make a folder that says we live."""
        private_folder(self._root, mark=f"{_PREFIX}*")
        with _alone(self._root):  # a folder that is made but not locked yet looks abandoned
            self.swept = _swept(self._root)
            self._folder = _fresh(_PREFIX, self._root)
            private_file(self._folder / _LOCK)
            self._lock_fd = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def close(self) -> None:
        """Remove this boot's folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock_fd)
            self._folder = None

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[Path]:
        """A fresh folder, gone afterwards however the attempt ended."""
        folder = _fresh("attempt-", self.folder)
        try:
            yield folder
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    def free_bytes(self) -> int:
        """What is free on the disk for us."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def total_bytes(self) -> int:
        """How large the disk is."""
        found = os.statvfs(self.folder)
        return found.f_blocks * found.f_frsize


def sweep(root: Path) -> list[str]:
    """Remove what workers left that were killed; the names of the folders that are gone."""
    if not os.path.lexists(root):
        return []
    private_folder(root, mark=f"{_PREFIX}*")
    with _alone(root):
        return _swept(root)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """No other worker makes or sweeps folders here meanwhile."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _fresh(prefix: str, parent: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    folder.chmod(0o700)  # a umask may take the owner's rights too
    return folder


def _swept(root: Path) -> list[str]:
    gone = []
    for folder in root.glob(f"{_PREFIX}*"):
        if folder.is_symlink():
            folder.unlink()  # no worker made it, and what it points to is not ours to remove
        elif not _is_held(folder):
            shutil.rmtree(folder, ignore_errors=True)
            gone.append(folder.name)
    return gone


def _is_held(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
    return False


log = structlog.get_logger("tenure.transcode")

_LAUNCH = (sys.executable, "-I", "-S")
_LAUNCHER = Path(__file__).with_name("confine.py")
_ERROR_BYTES_MAX = 4_096
_LINE_BYTES_MAX = 65_536
_WATCH_EVERY_S = 0.5
_BLOCK_BYTES = 4_096
NOBODY = 65_534
# For root's cages: no user of a common system is in here (systemd keeps what follows it).
UIDS = range(0x70000000, 0x7F000000)

# What a dynamically linked ffmpeg needs to start, and nothing that differs between machines.
READABLE = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom"),
)
PARTS = {
    "network": "ffmpeg runs with the worker's network",
    "files": "ffmpeg may read what other users may, and write where they may",
    "syscalls": "ffmpeg may use every system call",
}
_REMEDY = (
    "a kernel with Landlock (5.13), user namespaces or bubblewrap gives it, or take the word out "
    "of transcode.require"
)

TakeLine = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the program may use: bytes of memory and of each file, seconds of CPU and in all.

    `threads` counts processes too, and all of its user where it has neither a user of its own (as
    root gives it) nor a namespace.
    `folder_bytes` is what its folder may take of the disk, looked at twice a second.
    """

    memory_bytes: int
    file_bytes: int
    cpu_s: int
    wall_s: float
    threads: int = 1024
    folder_bytes: int = sys.maxsize

    def as_rlimits(self) -> dict[str, int]:
        """By the kernel's names. No core dumps: they would hold the customer's pictures."""
        return {
            "AS": self.memory_bytes,
            "FSIZE": self.file_bytes,
            "CPU": self.cpu_s,
            "NPROC": self.threads,
            "NOFILE": 256,
            "CORE": 0,
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended: exit code (negative: signal) and the end of what it said on stderr."""

    code: int
    said: str
    filled_folder: bool = False

    @property
    def hit_file_limit(self) -> bool:
        """It wanted to write a larger file than permitted, or too many."""
        by_kernel = (-signal.SIGXFSZ, 128 + signal.SIGXFSZ)  # the second as bubblewrap says it
        return self.filled_folder or self.code in by_kernel


@dataclass(frozen=True, slots=True)
class Cage:
    """What the program is kept from. The default is no cage, but limits and no rights.

    `network` is "none" where it has none, else "shared"; `files` is how files outside of its folder
    are kept away ("landlock", "namespace", "bubblewrap", or "open": not at all); `syscalls` says
    whether calls that a codec never needs are refused, those for sockets and processes among them.
    `readable` are the system's folders and files that it may read; `lacks` says for each part that
    it could not have, why.
    """

    network: str = "shared"
    files: str = "open"
    syscalls: bool = False
    namespace: bool = False
    readable: tuple[str, ...] = READABLE
    lacks: Mapping[str, str] = field(default_factory=dict)

    def words(self, limits: Limits) -> str:
        """What the launcher is asked for."""
        return json.dumps(
            {
                "network": self.namespace,
                "files": self.files,
                "syscalls": self.syscalls,
                "readable": self.readable,
                "bwrap": shutil.which("bwrap") or "",
                "limits": limits.as_rlimits(),
            }
        )

    async def run(
        self, argv: Sequence[str], *, folder: Path, limits: Limits, line: TakeLine | None = None
    ) -> Ended:
        """Run to its end in `folder`, handing on what it says on stdout line by line."""
        asked = self.words(limits)
        process = await _start([asked, *argv], folder)
        watch = asyncio.create_task(_watch(folder, limits.folder_bytes, process))
        try:
            async with asyncio.timeout(limits.wall_s):
                said, _ = await asyncio.gather(
                    _tail(process.stderr), _lines(process.stdout, line or _ignore)
                )
                code = await process.wait()
        finally:
            _end_all(process)
            filled = watch.done()
            watch.cancel()
            await asyncio.shield(process.wait())
        return Ended(code, said, filled)


@cache
def find_cage(
    program: Path, readable: tuple[str, ...] = (), required: tuple[str, ...] = ()
) -> Cage:
    """See in which cage the program starts here; refuses to go without a part that is required."""
    if unknown := sorted(set(required) - PARTS.keys()):
        raise UsageError(f"{unknown[0]!r} is no part of the cage; there are {', '.join(PARTS)}")
    plain = Cage(readable=(*READABLE, *readable))
    lacks: dict[str, str] = {}
    syscalls = replace(plain, syscalls=True)
    if why := _fails(syscalls, program):
        lacks["syscalls"] = why
    files, reasons = "open", []
    for name in views():
        why = _fails(replace(plain, files=name), program)
        if not why:
            files = name
            break
        reasons.append(f"{name}: {why}")
    else:
        lacks["files"] = "; ".join(reasons)
    why = "" if files == "bubblewrap" else _fails(replace(plain, namespace=True), program)
    if why and "syscalls" in lacks:
        lacks["network"] = why
    for part, reason in lacks.items():
        if part in required:
            raise UsageError(f"ffmpeg must not run here: {PARTS[part]} ({reason}); {_REMEDY}")
        log.warning(PARTS[part], reason=reason)
    return replace(
        plain,
        network="shared" if "network" in lacks else "none",
        namespace=not why and files != "bubblewrap",
        files=files,
        syscalls="syscalls" not in lacks,
        lacks=lacks,
    )


def views() -> list[str]:
    """The ways to keep files away that can be tried here, best first."""
    has_bwrap = os.geteuid() != 0 and shutil.which("bwrap")
    return ["landlock", "namespace", *(["bubblewrap"] if has_bwrap else [])]


def _fails(cage: Cage, program: Path) -> str:
    """Why the program does not start in this cage; "" when it does."""
    limits = Limits(memory_bytes=2**32, file_bytes=0, cpu_s=10, wall_s=10)
    with tempfile.TemporaryDirectory(prefix="tenure-cage-") as folder:
        give_to_cage(Path(folder))
        try:
            done = subprocess.run(  # nosec B603 # the program that the operator chose
                [*_LAUNCH, str(_LAUNCHER), cage.words(limits), str(program), "-version"],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=30,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "it does not end"
    said = done.stderr.decode(errors="replace").strip().removeprefix("confine: ")
    return (said[-300:] or f"status {done.returncode}") if done.returncode else ""


def give_to_cage(folder: Path) -> None:
    """The caged program writes here; where we are root it runs as the owner of the folder.

    That is a user of its own: the kernel counts threads by user, so cages with the same one would
    take them from each other. In a container that has no such users it is nobody.
    """
    if os.geteuid() == 0:
        uid = secrets.choice(UIDS)
        try:
            os.chown(folder, uid, uid)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.chown(folder, NOBODY, NOBODY)


def take_from_cage(folder: Path) -> None:
    """What was caged cannot change its outputs any more, should a part of it still run."""
    if os.geteuid() == 0:
        os.chown(folder, 0, 0)


async def _start(words: Sequence[str], folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *_LAUNCH,
        str(_LAUNCHER),
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        env={},
        start_new_session=True,
        limit=_LINE_BYTES_MAX,
    )


async def _watch(folder: Path, bytes_max: int, process: asyncio.subprocess.Process) -> None:
    """Ends the program when its folder takes more of the disk than permitted; else for ever."""
    while await asyncio.to_thread(_disk_bytes, folder) <= bytes_max:  # noqa: ASYNC110 - no event
        await asyncio.sleep(_WATCH_EVERY_S)
    _end_all(process)


def _disk_bytes(folder: Path) -> int:
    """Of all files below; an empty one counts as a block, for it takes an inode."""
    total, folders = 0, [str(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512 or _BLOCK_BYTES
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return total


async def _lines(stream: asyncio.StreamReader | None, take: TakeLine) -> None:
    """Hand on each line. One that is longer than the limit holds no progress and is skipped."""
    while stream is not None:
        try:
            raw = await stream.readline()
        except ValueError:
            continue
        if not raw:
            return
        await take(raw.decode(errors="replace").rstrip("\n"))


async def _tail(stream: asyncio.StreamReader | None) -> str:
    kept = b""
    while stream is not None and (piece := await stream.read(65_536)):
        kept = (kept + piece)[-_ERROR_BYTES_MAX:]
    return kept.decode(errors="replace").strip()


async def _ignore(_line: str) -> None:
    pass


def _end_all(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
