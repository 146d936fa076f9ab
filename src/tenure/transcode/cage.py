"""Where and how ffmpeg runs: the folder of an attempt, and the cage that confines the program."""

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
from tenure.core.process import read_lines, read_tail, running, signal_group
from tenure.store.files import private_file, private_folder

_PREFIX = "boot-"
_LOCK = ".lock"


class Workspace:
    """The folder of this worker process, with a subfolder for each attempt."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder: Path | None = None
        self._lock_fd = -1
        self.swept: list[str] = []

    @property
    def folder(self) -> Path:
        """The folder of this process."""
        if self._folder is None:
            raise UsageError("the workspace has not been opened")
        return self._folder

    def open(self) -> Workspace:
        """Remove the folders of dead workers, and make a locked folder of our own."""
        private_folder(self._root, mark=f"{_PREFIX}*")
        with _locked(self._root):  # a folder that is not locked yet looks abandoned
            self.swept = _sweep(self._root)
            self._folder = _make_folder(_PREFIX, self._root)
            private_file(self._folder / _LOCK)
            self._lock_fd = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def close(self) -> None:
        """Remove the folder of this process."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock_fd)
            self._folder = None

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[Path]:
        """A new folder, removed afterwards however the attempt ended."""
        folder = _make_folder("attempt-", self.folder)
        try:
            yield folder
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    def free_bytes(self) -> int:
        """Bytes of the disk that we may still use."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def total_bytes(self) -> int:
        """The size of the disk."""
        found = os.statvfs(self.folder)
        return found.f_blocks * found.f_frsize


def sweep(root: Path) -> list[str]:
    """Remove the folders of workers that were killed; returns their names."""
    if not os.path.lexists(root):
        return []
    private_folder(root, mark=f"{_PREFIX}*")
    with _locked(root):
        return _sweep(root)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Keep other workers from making or removing folders here."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _make_folder(prefix: str, parent: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    folder.chmod(0o700)  # the umask may remove the owner's rights too
    return folder


def _sweep(root: Path) -> list[str]:
    removed = []
    for folder in root.glob(f"{_PREFIX}*"):
        if folder.is_symlink():
            folder.unlink()  # no worker made it, and its target is not ours to remove
        elif not _is_locked(folder):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
    return removed


def _is_locked(folder: Path) -> bool:
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
_WATCH_EVERY_S = 0.5
_BLOCK_BYTES = 4_096
NOBODY = 65_534
# User ids for cages that root starts. No usual account has one; systemd's own range follows.
_UIDS = range(0x70000000, 0x7F000000)

# What a dynamically linked ffmpeg needs to start. Nothing here differs between machines.
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
    "a kernel with Landlock (5.13), user namespaces or bubblewrap provides it; or remove the word "
    "from transcode.require"
)

OnLine = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of memory and of each file, seconds of CPU time and of wall time.

    `threads` includes processes. It counts all processes of the program's user unless the program
    has a user of its own (if we are root) or a namespace. `folder_bytes` limits the disk space of
    its folder, checked twice a second.
    """

    memory_bytes: int
    file_bytes: int
    cpu_s: int
    wall_s: float
    threads: int = 1024
    folder_bytes: int = sys.maxsize

    def as_rlimits(self) -> dict[str, int]:
        """The limits by the kernel's names. A core dump would contain the customer's media."""
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
    """The exit code (negative: a signal) and the end of stderr."""

    code: int
    stderr: str
    filled_folder: bool = False

    @property
    def hit_file_limit(self) -> bool:
        """Whether it tried to write a file over the limit, or too many files."""
        by_kernel = (-signal.SIGXFSZ, 128 + signal.SIGXFSZ)  # bubblewrap reports the second one
        return self.filled_folder or self.code in by_kernel


@dataclass(frozen=True, slots=True)
class Cage:
    """What the program cannot reach. The default confines nothing but sets limits and drops rights.

    `network` is "none" or "shared". `files` is the method that hides files outside its folder:
    "landlock", "namespace" or "bubblewrap"; "open" hides none. `syscalls` refuses the system calls
    that a codec never needs, such as those for sockets and processes. `readable` are the system's
    folders and files that it may read. `lacks` maps each part that this machine cannot provide to
    the reason.
    """

    network: str = "shared"
    files: str = "open"
    syscalls: bool = False
    namespace: bool = False
    readable: tuple[str, ...] = READABLE
    lacks: Mapping[str, str] = field(default_factory=dict)

    def request(self, limits: Limits) -> str:
        """The request to the launcher, as JSON."""
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
        self, argv: Sequence[str], *, folder: Path, limits: Limits, line: OnLine | None = None
    ) -> Ended:
        """Run to the end in `folder`; `line` gets each line of stdout."""
        command = [*_LAUNCH, str(_LAUNCHER), self.request(limits), *argv]
        async with running(command, cwd=folder, env={}, separate_stderr=True) as process:
            watch = asyncio.create_task(_watch(folder, limits.folder_bytes, process.pid))
            try:
                async with asyncio.timeout(limits.wall_s):
                    stderr, _ = await asyncio.gather(
                        read_tail(process.stderr, _ERROR_BYTES_MAX),
                        _each_line(process.stdout, line),
                    )
                    code = await process.wait()
            finally:
                filled = watch.done()
                watch.cancel()
        return Ended(code, stderr.decode(errors="replace").strip(), filled)


@cache
def find_cage(
    program: Path, readable: tuple[str, ...] = (), required: tuple[str, ...] = ()
) -> Cage:
    """Find out which parts of the cage work here; raises if a required part does not."""
    if unknown := sorted(set(required) - PARTS.keys()):
        raise UsageError(f"{unknown[0]!r} is no part of the cage; there are {', '.join(PARTS)}")
    plain = Cage(readable=(*READABLE, *readable))
    lacks: dict[str, str] = {}
    syscalls = replace(plain, syscalls=True)
    if why := _why_fails(syscalls, program):
        lacks["syscalls"] = why
    files, reasons = "open", []
    for name in file_methods():
        why = _why_fails(replace(plain, files=name), program)
        if not why:
            files = name
            break
        reasons.append(f"{name}: {why}")
    else:
        lacks["files"] = "; ".join(reasons)
    why = "" if files == "bubblewrap" else _why_fails(replace(plain, namespace=True), program)
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


def file_methods() -> list[str]:
    """The methods of hiding files that can be tried here, best first."""
    has_bwrap = os.geteuid() != 0 and shutil.which("bwrap")
    return ["landlock", "namespace", *(["bubblewrap"] if has_bwrap else [])]


def _why_fails(cage: Cage, program: Path) -> str:
    """Why the program does not start in this cage; "" if it does."""
    limits = Limits(memory_bytes=2**32, file_bytes=0, cpu_s=10, wall_s=10)
    with tempfile.TemporaryDirectory(prefix="tenure-cage-") as folder:
        give_to_cage(Path(folder))
        try:
            done = subprocess.run(  # nosec B603 # the program that the operator chose
                [*_LAUNCH, str(_LAUNCHER), cage.request(limits), str(program), "-version"],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=30,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "it does not end"
    stderr = done.stderr.decode(errors="replace").strip().removeprefix("confine: ")
    return (stderr[-300:] or f"status {done.returncode}") if done.returncode else ""


def give_to_cage(folder: Path) -> None:
    """Let the caged program write here: if we are root, it runs as the owner of the folder.

    Each cage gets a user of its own, because the kernel counts threads per user and cages of one
    user would share the limit. In a container without such user ids it is nobody.
    """
    if os.geteuid() == 0:
        uid = secrets.choice(_UIDS)
        try:
            os.chown(folder, uid, uid)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.chown(folder, NOBODY, NOBODY)


def take_from_cage(folder: Path) -> None:
    """Take the outputs away from the program, in case a part of it still runs."""
    if os.geteuid() == 0:
        os.chown(folder, 0, 0)


async def _watch(folder: Path, bytes_max: int, pid: int) -> None:
    """Kill the program when its folder takes more disk space than permitted."""
    while await asyncio.to_thread(_disk_bytes, folder) <= bytes_max:  # noqa: ASYNC110 - no event
        await asyncio.sleep(_WATCH_EVERY_S)
    signal_group(pid, signal.SIGKILL)


def _disk_bytes(folder: Path) -> int:
    """The disk space of all files below; an empty file counts as a block, as it takes an inode."""
    total, folders = 0, [str(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512 or _BLOCK_BYTES
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return total


async def _each_line(stream: asyncio.StreamReader | None, line: OnLine | None) -> None:
    async for text in read_lines(stream):
        if line is not None:
            await line(text)
