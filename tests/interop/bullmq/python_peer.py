"""The `bullmq` package for Python as a peer, in an environment of its own under `.tools`."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "python_package"
ROOT = Path(__file__).parents[3]
ENVIRONMENT = ROOT / ".tools" / "peers" / "bullmq"
MAKE_WITHIN_S = 300
ANSWER_S = 60.0


def installed() -> Path:
    """The Python of the peer's environment, made from its pins when they have changed."""
    pins = HERE / "requirements.txt"
    python, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / ".made-from"
    wanted = hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()
    ENVIRONMENT.parent.mkdir(parents=True, exist_ok=True)
    with (ENVIRONMENT.parent / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(ENVIRONMENT, ignore_errors=True)
            for command in _making(python, pins):
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=MAKE_WITHIN_S
                )
                assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"
            stamp.write_text(wanted)
    return python


def _making(python: Path, pins: Path) -> list[list[str]]:
    beside = ROOT / ".tools" / "bin" / "uv"
    uv = os.environ.get("TENURE_UV") or shutil.which("uv")
    uv = uv or (str(beside) if beside.exists() else None)
    if uv:
        return [
            [uv, "venv", "--quiet", "--python", sys.executable, str(ENVIRONMENT)],
            [uv, "pip", "install", "--quiet", "--python", str(python), "-r", str(pins)],
        ]
    return [
        [sys.executable, "-m", "venv", str(ENVIRONMENT)],
        [str(python), "-m", "pip", "install", "--quiet", "-r", str(pins)],
    ]


class PythonPackage:
    """Runs `driver.py` on one queue of one server."""

    def __init__(self, python: Path, port: int, queue: str) -> None:
        self._words = (str(python), str(HERE / "driver.py"))
        self._where = (str(port), queue)

    async def add(self, *jobs: tuple[str, Any, dict[str, Any]]) -> list[str]:
        """Add jobs (name, data, options); their ids."""
        lines = [json.dumps({"name": n, "data": d, "opts": o}) for n, d, o in jobs]
        return await self._ask("add", lines)

    async def see(self, job_ids: list[str]) -> list[dict[str, Any]]:
        """State, result, reason and attempts of jobs, as the package reads them."""
        return [json.loads(line) for line in await self._ask("see", job_ids)]

    async def work(self) -> asyncio.subprocess.Process:
        """A worker that has started; the caller ends it."""
        process = await self._start("work")
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), ANSWER_S)
        assert line == b"ready\n", (await process.communicate())[1].decode()
        return process

    async def _ask(self, verb: str, lines: list[str]) -> list[str]:
        process = await self._start(verb)
        text = "".join(f"{line}\n" for line in lines).encode()
        out, errors = await asyncio.wait_for(process.communicate(text), ANSWER_S)
        assert process.returncode == 0, errors.decode()
        return out.decode().splitlines()

    async def _start(self, verb: str) -> asyncio.subprocess.Process:
        # Without PYTHONPATH: what is tested is the package, not our own code beside it.
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *self._words, verb, *self._where, stdin=pipe, stdout=pipe, stderr=pipe, env=clean
        )
