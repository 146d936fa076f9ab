"""Children of the harness and what they use, read from /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own: it and all its forks can be killed together."""
    return subprocess.Popen(
        argv,
        env=None if env is None else dict(env),
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=_die_with_parent,  # noqa: PLW1509 - children are started before any thread
    )


def kill(child: subprocess.Popen[bytes]) -> None:
    """kill -9 of the child and of everything it forked, and reap it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and its descendants use: CPU so far, resident memory now."""

    cpu_s: float
    rss_mb: float
    processes: int


def usage(pid: int) -> Usage:
    """Sum over the process tree; a member that ends meanwhile is left out."""
    cpu_s = rss_bytes = 0.0
    count = 0
    for member in _tree(pid):
        try:
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            pages = int(Path(f"/proc/{member}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        cpu_s += (int(fields[11]) + int(fields[12])) / TICKS_PER_S
        rss_bytes += pages * PAGE_BYTES
        count += 1
    return Usage(cpu_s, rss_bytes / 1e6, count)


def reaped_cpu_s(pid: int) -> float:
    """CPU of children of this process that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / TICKS_PER_S


def rss_mb(pid: int) -> float:
    """Resident memory of this one process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * PAGE_BYTES / 1e6


def _tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def allow_open_files(wanted: int) -> None:
    """Raise the limit of open files for us and for every child started later."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
        except (ValueError, PermissionError) as refused:
            raise RuntimeError(
                f"this scenario needs {wanted} open files and the hard limit is {hard}: "
                f"raise it (ulimit -Hn {wanted}) or ask for fewer clients with --jobs"
            ) from refused
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
