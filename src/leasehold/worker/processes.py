"""`--processes N`: runs N copies of a command, brings crashed ones back, and stops them in order.

Each copy leads a session of its own: a Ctrl-C at the terminal reaches the supervisor alone, which
passes it on exactly once, so that nobody takes it for the second one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import structlog

from leasehold.worker.backoff import Backoff

log = structlog.get_logger("leasehold.supervisor")

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """How copies are brought back: pauses grow while one keeps dying within `healthy_ms`."""

    restart_ms: int = 500
    restart_ms_max: int = 30_000
    healthy_ms: int = 60_000


class Supervisor:
    """Keeps `count` processes of `command` running until it is told to stop.

    A copy that ends with 0 is done and not started again. `environ` is the whole environment of
    the copies; each gets its number as `LEASEHOLD_PROCESS`. `on_event` hears ("started", pid),
    ("exited", code) and ("restarting", number).
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        environ: Mapping[str, str],
        supervision: Supervision | None = None,
        rng: Random | None = None,
        on_event: Callable[[str, int], None] | None = None,
    ) -> None:
        if count < 1:
            raise ValueError(f"processes is at least 1, not {count}")
        self._command = list(command)
        self._count = count
        self._environ = dict(environ)
        self._supervision = supervision or Supervision()
        self._rng = rng or Random()
        self._tell = on_event or (lambda _name, _number: None)
        self._live: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()

    def run(self) -> int:
        """Supervise with signals routed; the exit code is the worst of the copies' last ones."""
        return asyncio.run(self._run_with_signals())

    async def supervise(self) -> int:
        """The same inside a running loop; stop it with `forward`."""
        codes = await asyncio.gather(*(self._keep(number) for number in range(self._count)))
        return max((1 if code < 0 else code for code in codes), default=0)

    def forward(self, number: int) -> None:
        """Pass a signal to every copy; from the first one on nothing is started again."""
        self._stopping.set()
        for process in self._live.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _run_with_signals(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.forward, number)
        return await self.supervise()

    async def _keep(self, number: int) -> int:
        """One copy, with as many lives as it needs."""
        rules = self._supervision
        backoff = Backoff(self._rng, rules.restart_ms, rules.restart_ms_max)
        loop = asyncio.get_running_loop()
        code = 0
        while not self._stopping.is_set():
            began = loop.time()
            code = await self._live_once(number)
            self._tell("exited", code)
            if code == 0 or self._stopping.is_set():
                break
            if (loop.time() - began) * 1000 >= rules.healthy_ms:
                backoff.reset()
            pause_s = backoff.pause_s()
            log.error("a worker process died", process=number, exit_code=code, restart_s=pause_s)
            self._tell("restarting", number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
        return code

    async def _live_once(self, number: int) -> int:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            env={**self._environ, "LEASEHOLD_PROCESS": str(number)},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            preexec_fn=_die_with(os.getpid()) if sys.platform == "linux" else None,
        )
        self._live[number] = process
        self._tell("started", process.pid)
        if self._stopping.is_set():  # it came between our stop and its start
            process.send_signal(signal.SIGTERM)
        try:
            return await process.wait()
        finally:
            del self._live[number]


def _die_with(parent: int) -> Callable[[], None]:
    """Runs in the new process before its program: a SIGTERM when the supervisor dies.

    The library is loaded here, before the fork, because after it only the call itself is safe.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask
