"""The command line against real servers: a Redis of our own, one queue a test."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tenure.cli.console import run
from tenure.store.embedded import EmbeddedRedis
from tests.ports import free_port

DEADLINE_S = 40.0


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    server = EmbeddedRedis()
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def queue_url(redis_url: str) -> str:
    return f"streams+{redis_url}?namespace=t{secrets.token_hex(4)}:"


@dataclass(frozen=True)
class Said:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[Any]:
        """stdout as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


Cli = Callable[..., Said]


@pytest.fixture
def cli(
    queue_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Cli:
    """Runs a command in this process, in an empty folder, on this test's queue."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TENURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TENURE_QUEUE_URL", queue_url)

    def call(*args: str) -> Said:
        # They set up logging for the whole process, on a stream that ends with this test.
        assert args[0] not in ("gateway", "worker", "up"), "start it as a program of its own"
        capfd.readouterr()
        code = run(list(args))
        said = capfd.readouterr()
        return Said(code, said.out, said.err)

    return call


class Program:
    """A process of `tenure`, or of another module or, with "", a file: its words are kept, and it
    is gone at the end."""

    def __init__(
        self,
        args: list[str],
        folder: Path,
        environment: dict[str, str],
        *python: str,
        module: str = "tenure.cli",
    ) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("TENURE_")}
        self.process = subprocess.Popen(
            [sys.executable, *python, *(["-m", module] if module else []), *args],
            cwd=folder,
            env=clean | {"PYTHONUNBUFFERED": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=self._keep, args=pair, daemon=True)
            for pair in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    def _keep(self, stream: Any, lines: list[str]) -> None:
        for line in stream:  # not all at once: what has come so far is looked at meanwhile
            lines += [line.rstrip("\n")]

    def heard(self, words: str, count: int = 1, within_s: float = DEADLINE_S) -> str:
        """Wait until a line with these words has come (so often), and return the last."""

        def lines() -> list[str]:
            return [line for line in [*self.out, *self.err] if words in line]

        wait_until(lambda: len(lines()) >= count or self.process.poll() is not None, within_s)
        found = lines()
        assert len(found) >= count, f"{words!r} was not said:\n" + self.words
        return found[-1]

    @property
    def words(self) -> str:
        return "\n".join([*self.out, *self.err])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """Wait for its end and return its exit code."""
        code = self.process.wait(DEADLINE_S)
        for reader in self._readers:
            reader.join(5)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


Start = Callable[..., Program]


@pytest.fixture
def start(queue_url: str, tmp_path: Path) -> Iterator[Start]:
    """Starts `tenure` processes in the test's folder, on this test's queue."""
    programs: list[Program] = []

    def begin(*args: str, **environment: str) -> Program:
        chosen = {"TENURE_QUEUE_URL": queue_url} | environment
        programs.append(Program(list(args), tmp_path, {k: v for k, v in chosen.items() if v}))
        return programs[-1]

    yield begin
    for program in reversed(programs):
        program.kill()


def wait_until(
    condition: Callable[[], object], within_s: float = DEADLINE_S, every_s: float = 0.02
) -> None:
    """Look again and again; not too often where each look is a program of its own."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(every_s)  # looks again until the deadline


@pytest.fixture(name="free_port")
def a_free_port() -> int:
    return free_port()
