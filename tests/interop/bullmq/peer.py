"""A real BullMQ on the other side: the Node program `driver.cjs`, asked in JSON lines."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import threading
from pathlib import Path
from typing import Any

from tenure.store.embedded import locate_node
from tests.interop.npm import installed

HERE = Path(__file__).parent
ANSWER_S = 30.0


class NodeError(Exception):
    """What Node answered instead of a result."""


def install() -> None:
    """Make `node_modules` from the lock file, once; whatever is wrong raises."""
    installed(HERE)


class Node:
    """One Node process with BullMQ of one major version, on one server under one key prefix.

    The server is a port of this machine, or `cluster:port` for the cluster of that node.
    """

    def __init__(self, major: int, port: int | str, prefix: str = "bull") -> None:
        self.major = major
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [str(locate_node()), str(HERE / "driver.cjs"), str(major), str(port), prefix],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE,
        )

    def ask(self, **question: Any) -> Any:
        """One question, one answer; a thrown error raises `NodeError`."""
        with self._lock:
            question["no"] = next(self._numbers)
            assert self._process.stdin
            assert self._process.stdout
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            alarm = threading.Timer(ANSWER_S, self._process.kill)
            alarm.start()
            line = self._process.stdout.readline()
            alarm.cancel()
        if not line:
            raise NodeError(f"Node ended while it was asked {question}")
        answer = json.loads(line)
        assert answer["no"] == question["no"]
        if "error" in answer:
            raise NodeError(f"{answer['name']}: {answer['error']}")
        return answer["ok"]

    def call(self, on: str, method: str, *args: Any, **extra: Any) -> Any:
        """Call a method of a BullMQ object: `call("queue:mail", "add", "welcome", {})`."""
        return self.ask(do="call", on=on, method=method, args=list(args), **extra)

    async def aask(self, **question: Any) -> Any:
        """`ask` from an event loop."""
        return await asyncio.to_thread(lambda: self.ask(**question))

    async def acall(self, on: str, method: str, *args: Any, **extra: Any) -> Any:
        """`call` from an event loop."""
        return await asyncio.to_thread(lambda: self.call(on, method, *args, **extra))

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kill -9, as an accident would."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            try:
                self.ask(do="close")
                self._process.wait(timeout=5)
            except (NodeError, OSError, subprocess.TimeoutExpired):
                self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
