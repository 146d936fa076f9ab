"""The private Redis of one benchmark run: its own folder, TCP port and unix socket.

TCP is what the peers use, all alike; the socket is the harness's own way in, so that its few
commands never queue behind theirs. Nothing is persisted unless `--aof` asks for it.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from harness import processes
from harness.resp import Link
from tenure.store.embedded.programs import redis_environment, redis_program, tracks_latency

Aof = Literal["off", "everysec", "always"]

# What the harness itself asks is not the peers' doing.
OWN_COMMANDS = frozenset({"info", "config|resetstat", "flushall", "ping", "client|setinfo"})
SCRIPT_COMMANDS = frozenset({"eval", "evalsha", "fcall"})


@dataclass(frozen=True, slots=True)
class Spent:
    """What the server spent since the last `fresh()`."""

    cpu_s: float
    commands: int
    scripts: int


class PrivateRedis:
    """A redis-server that nobody else knows of; a context manager."""

    def __init__(
        self, *, aof: Aof = "off", clients: int = 2_000, settings: Sequence[str] = ()
    ) -> None:
        # The one that `tenure up` would start here: the machine's own, else the wheel's.
        program = redis_program()
        self.folder = Path(tempfile.mkdtemp(prefix="tenure-bench-"))
        self.socket = self.folder / "redis.sock"
        self.aof = aof
        self.port = free_port()
        processes.allow_open_files(clients + 512)
        self._cpu_before_s = 0.0
        options = [*_options(self.port, self.socket, self.folder, aof, clients), *settings]
        if tracks_latency(program):
            options += ["--latency-tracking", "no"]
        environment = redis_environment(program)
        self._preloaded = Path(environment.get("LD_PRELOAD", "")).name
        self._child = processes.start([str(program), *options], env=environment)
        self._link = self._connect()

    @property
    def url(self) -> str:
        """The address every peer gets."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def version(self) -> str:
        info = self._link.info("server")
        name = info.get("server_name", "redis")
        # Valkey says in `redis_version` only which Redis its clients may take it for.
        version = f"{name} {info.get(f'{name}_version', info['redis_version'])}"
        return f"{version} with {self._preloaded}" if self._preloaded else version

    @property
    def pid(self) -> int:
        return self._child.pid

    def fresh(self) -> None:
        """Empty the server and start counting from zero."""
        self._link.call("FLUSHALL", "SYNC")
        self.reset_counters()

    def reset_counters(self) -> None:
        """Count CPU and commands from here."""
        self._link.call("CONFIG", "RESETSTAT")
        self._cpu_before_s = self._cpu_s()

    def spent(self) -> Spent:
        """CPU and commands since the last reset; scripts count, and so do the calls they make."""
        commands = scripts = 0
        for name, figures in self._link.info("commandstats").items():
            command = name.removeprefix("cmdstat_")
            calls = int(figures.split(",")[0].removeprefix("calls="))
            if command not in OWN_COMMANDS:
                commands += calls
            if command in SCRIPT_COMMANDS:
                scripts += calls
        return Spent(self._cpu_s() - self._cpu_before_s, commands, scripts)

    def network_bytes(self) -> int:
        """What came in and went out since the last reset."""
        stats = self._link.info("stats")
        return int(stats["total_net_input_bytes"]) + int(stats["total_net_output_bytes"])

    def used_memory_mb(self) -> float:
        return int(self._link.info("memory")["used_memory"]) / 1e6

    def call(self, *words: str | int) -> Any:
        """Any command, for scenarios."""
        return self._link.call(*words)

    def _cpu_s(self) -> float:
        info = self._link.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    def _connect(self) -> Link:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                link = Link(self.socket)
                link.call("PING")
            except (FileNotFoundError, ConnectionError, RuntimeError):
                if self._child.poll() is not None:
                    break
                time.sleep(0.02)
            else:
                return link
        self.stop()
        raise RuntimeError("the private redis-server did not start; try it by hand to see why")

    def stop(self) -> None:
        processes.kill(self._child)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> PrivateRedis:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _options(port: int, path: Path, folder: Path, aof: Aof, clients: int) -> list[str]:
    listen = ["--port", str(port), "--bind", "127.0.0.1", "--unixsocket", str(path)]
    limits = ["--maxclients", str(clients), "--tcp-backlog", "511", "--daemonize", "no"]
    # What our own embedded server is set to, as is `latency-tracking`; every contender runs on it.
    compact = ["--stream-node-max-bytes", "1024", "--hash-max-listpack-value", "512"]
    disk = ["--dir", str(folder), "--save", "", "--appendonly", "no" if aof == "off" else "yes"]
    if aof != "off":
        disk += ["--appendfsync", aof]
    return [*listen, *limits, *compact, *disk]


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
