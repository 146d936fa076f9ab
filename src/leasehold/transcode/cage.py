"""Runs a program confined: its limits, its lines, and its end, whatever happens to us.

What the kernel gives for isolation is looked up once. Where it gives no empty network (a container
without user namespaces), that is said in the log and in every result, or refused by a setting.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from leasehold.core.errors import UsageError

log = structlog.get_logger("leasehold.transcode")

_LAUNCHER = Path(__file__).with_name("confine.py")
_ERROR_BYTES_MAX = 4_096
_LINE_BYTES_MAX = 65_536
NOBODY = 65_534

TakeLine = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the program may use: bytes of memory and of each file, seconds of CPU and in all."""

    memory_bytes: int
    file_bytes: int
    cpu_s: int
    wall_s: float

    def as_rlimits(self) -> dict[str, int]:
        """By the kernel's names. No core dumps: they would hold the customer's pictures."""
        return {
            "AS": self.memory_bytes,
            "FSIZE": self.file_bytes,
            "CPU": self.cpu_s,
            "NOFILE": 256,
            "CORE": 0,
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended: exit code (negative: signal) and the end of what it said on stderr."""

    code: int
    said: str

    @property
    def hit_file_limit(self) -> bool:
        """It wanted to write a larger file than permitted."""
        return self.code == -signal.SIGXFSZ


@dataclass(frozen=True, slots=True)
class Cage:
    """`network` is "none" where the kernel takes it away, else "shared", for the reason `why`."""

    network: str
    why: str = ""

    async def run(
        self, argv: Sequence[str], *, folder: Path, limits: Limits, line: TakeLine | None = None
    ) -> Ended:
        """Run to its end in `folder`, handing on what it says on stdout line by line."""
        asked = json.dumps({"network": self.network, "limits": limits.as_rlimits()})
        process = await _start([asked, *argv], folder)
        try:
            async with asyncio.timeout(limits.wall_s):
                said, _ = await asyncio.gather(
                    _tail(process.stderr), _lines(process.stdout, line or _ignore)
                )
                code = await process.wait()
        finally:
            _end_all(process)
            await asyncio.shield(process.wait())
        return Ended(code, said)


async def find_cage(*, network_required: bool = False) -> Cage:
    """See what this machine permits; refuses where the network must go and cannot."""
    process = await _start([json.dumps({"probe": True})], Path("/"))
    out, err = await process.communicate()
    problem = (out + err).decode(errors="replace").strip()
    if not problem and process.returncode == 0:
        return Cage("none")
    if network_required:
        raise UsageError(
            f"ffmpeg must not have a network here, but the kernel keeps it: {problem}. Allow user "
            "namespaces to the worker, or cut its network yourself and turn network_required off"
        )
    log.warning("ffmpeg runs with the worker's network", reason=problem)
    return Cage("shared", problem)


def give_to_cage(folder: Path) -> None:
    """The caged program writes here; as root it runs as nobody, who must own the folder then."""
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)


async def _start(words: Sequence[str], folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
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


async def _lines(stream: asyncio.StreamReader | None, take: TakeLine) -> None:
    while stream is not None and (raw := await stream.readline()):
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
