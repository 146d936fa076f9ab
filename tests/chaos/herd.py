"""Real processes: workers by the real command line, gateways, and holders that do not give up.

A member is a name and a command; each start is a new generation with a new identity, as a
supervisor's restart would be. Every process dies with the test, whatever happens to it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tenure.core.process import spawn
from tests.chaos.effects import FOLDER_VARIABLE, now_ms
from tests.processes import stop

ROOT = Path(__file__).resolve().parents[2]
LOOK_EVERY_S = 0.02
ENDS_WITHIN_S = 15.0
YOUNG_MS = 5_000


@dataclass
class Member:
    """One place in the herd, over all its generations. `slots` is how many jobs it runs at once."""

    name: str
    argv: Sequence[str]
    slots: int = 0
    generation: int = 0
    process: subprocess.Popen[bytes] | None = None
    stopped: bool = False
    started_ms: int = 0

    @property
    def worker(self) -> str:
        """The name of this generation, with which its worker id begins."""
        return f"{self.name}.{self.generation}"

    @property
    def pid(self) -> int:
        """The process id of this generation."""
        assert self.process is not None, f"{self.name} was never started"
        return self.process.pid

    @property
    def runs(self) -> bool:
        """Whether its process is there (a stopped one is)."""
        return self.process is not None and self.process.poll() is None


class Herd:
    """Starts members, keeps them running, and does to them what the faults ask for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._keeper: asyncio.Task[None] | None = None
        self.members: dict[str, Member] = {}
        self.on_death: Callable[[Member], None] = lambda member: None

    async def __aenter__(self) -> Herd:
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    def add(self, name: str, argv: Sequence[str], *, slots: int = 0) -> Member:
        """A new member, started."""
        member = self.members[name] = Member(name, argv, slots)
        self.start(member)
        return member

    def start(self, member: Member) -> None:
        """The next generation of this member."""
        member.generation += 1
        member.stopped = False
        member.started_ms = now_ms()
        environment = {
            FOLDER_VARIABLE: str(self._folder),
            "POD_NAME": member.worker,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
        }
        member.process = spawn(
            _with(environment, member.argv),
            log=self._folder / f"{member.worker}.log",
            dies_by=signal.SIGKILL,
            cwd=ROOT,
        )

    def workers(self) -> list[Member]:
        """Members that run jobs."""
        return [member for member in self.members.values() if member.slots]

    def named(self, kind: str) -> list[Member]:
        """Members whose name begins so."""
        return [member for member in self.members.values() if member.name.startswith(kind)]

    @property
    def slots(self) -> int:
        """How many jobs the whole herd runs at once."""
        return sum(member.slots for member in self.members.values())

    def kill(self, member: Member) -> None:
        """kill -9, and gone when this returns."""
        process, member.process = member.process, None
        assert process is not None
        process.kill()
        process.wait()

    def stop(self, member: Member) -> None:
        """SIGSTOP: when this returns it stands still; its connections stay open."""
        stop(member.pid)
        member.stopped = True

    def go_on(self, member: Member) -> None:
        """SIGCONT: it goes on as if no time had passed."""
        os.kill(member.pid, signal.SIGCONT)
        member.stopped = False

    async def end(self, *, kindly: bool = False) -> dict[str, int]:
        """End all members, with a drain when `kindly`; returns their exit codes by name.

        One that was only just started may not listen to signals yet; its death by SIGTERM is as
        good as a drain and counts as 0.
        """
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        processes = {m.name: m.process for m in self.members.values() if m.process}
        now = now_ms()
        young = {m.name for m in self.members.values() if now - m.started_ms < YOUNG_MS}
        for member in self.members.values():
            if member.runs and member.stopped:
                self.go_on(member)
        for process in processes.values():
            process.send_signal(signal.SIGTERM if kindly else signal.SIGKILL)
        codes = {n: await asyncio.to_thread(_ended, process) for n, process in processes.items()}
        return {
            n: 0 if code == -signal.SIGTERM and n in young else code for n, code in codes.items()
        }

    def words_of(self, name: str, lines: int = 15) -> str:
        """The last that a member's generations have printed, for a report of a failure."""
        said = []
        for path in sorted(self._folder.glob(f"{name}.*.log")):
            said += path.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(said[-lines:])

    async def _keep(self) -> None:
        """What dies by itself is started again, as a supervisor would."""
        while True:
            for member in self.members.values():
                if member.process is not None and member.process.poll() is not None:
                    self.on_death(member)
                    self.start(member)
            await asyncio.sleep(LOOK_EVERY_S)


def worker_argv(url: str, *, concurrency: int, planted: Sequence[str] = ()) -> list[str]:
    """The real worker on the tasks of `tests.chaos.app`; `planted` (contract, fault) breaks it."""
    command = ["worker", "tests.chaos.app", "--queue", url, "--log-level", "warning"]
    command += ["--concurrency", str(concurrency)]
    if planted:
        return [sys.executable, "-m", "tests.chaos.planted", *planted, "tenure", *command]
    return [sys.executable, "-m", "tenure.cli", *command]


def stubborn_argv(url: str, *, slots: int, work_ms: int, planted: Sequence[str] = ()) -> list[str]:
    """A holder that writes whatever happened meanwhile, see `tests.chaos.stubborn`."""
    command = [url, str(slots), str(work_ms)]
    if planted:
        return [sys.executable, "-m", "tests.chaos.planted", *planted, "stubborn", *command]
    return [sys.executable, "-m", "tests.chaos.stubborn", *command]


def gateway_argv(url: str, port: int) -> list[str]:
    """The real gateway."""
    command = ["gateway", "--queue", url, "--port", str(port), "--log-level", "warning"]
    return [sys.executable, "-m", "tenure.cli", *command]


def _with(environment: Mapping[str, str], argv: Sequence[str]) -> list[str]:
    env = shutil.which("env")
    assert env is not None, "the program `env` belongs to every Linux"
    return [env, *(f"{name}={value}" for name, value in environment.items()), *argv]


def _ended(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
