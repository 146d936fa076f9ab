"""Who takes part: our client and the official one, behind the same few calls."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from pathlib import Path
from typing import Any, Protocol

from benchmarks.harness.environments import made_from
from tenure.contracts.omniq import Client, Paused
from tenure.core.errors import TenureError

HERE = Path(__file__).parent
VERSIONS = ("4.0.0", "1.7.0")


class PeerError(Exception):
    """What the official client raised; the text carries OmniQ's word."""


def interpreter(version: str) -> Path:
    """The Python of an environment that holds the official package of this version."""
    requirements = HERE / f"requirements-{version}.txt"
    return made_from(requirements, f"omniq-{version}") / "python"


class Party(Protocol):
    """One side of a shared queue."""

    name: str

    async def ask(self, call: str, **arguments: Any) -> Any:
        """One call of the contract by its name; `PeerError` when it is refused."""


class Official:
    """The official client in a process of its own."""

    def __init__(self, version: str, port: int, scripts_dir: str = "") -> None:
        self.version = version
        self.name = f"omniq {version}" + (" on our scripts" if scripts_dir else "")
        self._lock = threading.Lock()
        argv = [str(interpreter(version)), str(HERE / "driver.py"), "serve", str(port)]
        self._process = subprocess.Popen(
            [*argv, *([scripts_dir] if scripts_dir else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def ask(self, call: str, **arguments: Any) -> Any:
        return await asyncio.to_thread(self._ask, call, arguments)

    def _ask(self, call: str, arguments: dict[str, Any]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        with self._lock:
            stdin.write(json.dumps({"call": call, "arguments": arguments}) + "\n")
            stdin.flush()
            line = stdout.readline()
        assert line, f"{self.name} ended during {call}"
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["ok"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Ours:
    """Our client, its answers in the official one's shapes."""

    def __init__(self, url: str) -> None:
        self.name = "ours"
        self.client = Client(url)

    async def ask(self, call: str, **arguments: Any) -> Any:
        queue = arguments.pop("queue", None)
        payload = (arguments.pop("payload"),) if "payload" in arguments else ()
        try:
            answer = await getattr(self.client, call)(
                *(() if queue is None else (queue,)), *payload, **arguments
            )
        except TenureError as error:
            raise PeerError(str(error)) from None
        if isinstance(answer, Paused):
            return {"status": "PAUSED"}
        if hasattr(answer, "__struct_fields__"):
            return {name: getattr(answer, name) for name in answer.__struct_fields__}
        return list(answer) if isinstance(answer, tuple) else answer

    async def close(self) -> None:
        await self.client.close()
