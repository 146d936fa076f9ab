"""A peer under test: its adapter process (the producer) and its worker process.

The adapter speaks JSON lines: one request on its stdin, one answer on its stdout.

    prepare {concurrency}          -> {versions, notes, modes, worker: argv}
    enqueue {task, count, mode}    -> {seconds, cpu_seconds}      mode: single | concurrent | bulk
    pace {rate, seconds}           -> {count, seconds}            jobs carry their submit time
    unfinished {}                  -> {unfinished}                0: every effect is in the store
    stop {}                        -> {}

Every answer has `ok`; if it is false, `error` says why. The worker is started by the harness (so
that it can be measured and killed) with the argv that `prepare` named, in the adapter's folder.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from harness import environments, processes
from harness.server import PrivateRedis
from harness.waiting import until


class PeerError(RuntimeError):
    """The peer did not do what was asked; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the adapter said about itself."""

    versions: dict[str, str]
    notes: str
    modes: tuple[str, ...]
    worker: list[str]


class Peer:
    """One run of one peer; a context manager that leaves none of its processes alive."""

    def __init__(
        self, name: str, server: PrivateRedis, folder: Path, *, concurrency: int | None = None
    ) -> None:
        self.name = name
        self.home = environments.PEERS / name
        self.probe = folder / "probe.json"
        self._log = folder / "log.txt"
        self._binaries = environments.binaries(name)
        self._children: list[subprocess.Popen[bytes]] = []
        self._env = _environment(server, self.home, self._binaries, concurrency)
        self._unread = b""
        with self._log.open("ab") as log:
            self._adapter = processes.start(
                [str(self._binaries / "python"), "adapter.py"],
                env=self._env,
                cwd=self.home,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._children.append(self._adapter)
        told = self.ask("prepare", concurrency=concurrency)
        self.prepared = Prepared(
            told["versions"], told["notes"], tuple(told["modes"]), told["worker"]
        )

    def ask(self, operation: str, *, within_s: float = 600, **arguments: Any) -> dict[str, Any]:
        """One request, one answer."""
        stdin = self._adapter.stdin
        assert stdin is not None
        stdin.write(json.dumps({"op": operation, **arguments}).encode() + b"\n")
        stdin.flush()
        answer: dict[str, Any] = json.loads(self._line(operation, time.monotonic() + within_s))
        if not answer["ok"]:
            raise PeerError(f"{self.name} cannot {operation}: {answer['error']}{self.tail()}")
        return answer

    def _line(self, operation: str, deadline: float) -> bytes:
        stdout = self._adapter.stdout
        assert stdout is not None
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                raise PeerError(f"{self.name}: no answer to {operation} in time{self.tail()}")
            chunk = os.read(stdout.fileno(), 65536)
            if not chunk:
                raise PeerError(f"{self.name}: its adapter ended during {operation}{self.tail()}")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def start_worker(
        self, *, expect: int = 0, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start the peer's worker; its handlers report to `self.probe` after `expect` jobs."""
        told = {"BENCH_PROBE": str(self.probe), "BENCH_EXPECT": str(expect)}
        return self.start(self.prepared.worker, {**(env or {}), **told})

    def start(self, argv: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a program of the peer's environment in the adapter's folder."""
        program = self._binaries / argv[0]
        with self._log.open("ab") as log:
            child = processes.start(
                [str(program) if program.exists() else argv[0], *argv[1:]],
                env={**self._env, **env},
                cwd=self.home,
                stdout=log,
                stderr=log,
            )
        self._children.append(child)
        return child

    def wait_for(self, path: Path, child: subprocess.Popen[bytes], within_s: float) -> None:
        """Until the worker has written `path`; it must not end before."""

        def is_over() -> bool:
            return path.exists() or child.poll() is not None

        # The quickest runs last a third of a second: ten milliseconds more would be in the figure.
        in_time = until(is_over, within_s=within_s, every_s=0.001)
        if not in_time:
            raise PeerError(f"{self.name}: not done within {within_s:.0f} s{self.tail()}")
        if not path.exists():
            raise PeerError(f"{self.name}: its worker ended ({child.returncode}){self.tail()}")

    def told(self) -> dict[str, Any]:
        """What the handlers reported."""
        told: dict[str, Any] = json.loads(self.probe.read_text())
        return told

    def until_settled(self, within_s: float = 30) -> float:
        """Wait until the store holds nothing unfinished; the monotonic time when that was seen."""

        def is_settled() -> bool:
            return bool(self.ask("unfinished")["unfinished"] <= 0)

        if not until(is_settled, within_s=within_s, every_s=0.002):
            raise PeerError(f"{self.name}: jobs are still unfinished{self.tail()}")
        return time.monotonic()

    def tail(self) -> str:
        """The end of what the peer's processes printed, for error messages."""
        lines = self._log.read_text(errors="replace").splitlines()[-12:]
        return "".join(f"\n    | {line}" for line in lines)

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            processes.kill(child)
        for pipe in (self._adapter.stdin, self._adapter.stdout):
            if pipe is not None:
                pipe.close()


def _environment(
    server: PrivateRedis, home: Path, binaries: Path, concurrency: int | None
) -> dict[str, str]:
    paths = [environments.KIT, home]
    if not (home / "requirements.txt").exists():  # one of our own runs this very source
        paths.append(environments.PROJECT / "src")
    env = {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONUNBUFFERED": "1",
        "BENCH_REDIS_URL": server.url,
        "BENCH_REDIS_PORT": str(server.port),
    }
    if concurrency is not None:
        env["BENCH_CONCURRENCY"] = str(concurrency)
    return env
