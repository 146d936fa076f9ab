"""Several worker processes as one: started, kept running and stopped together.

To systemd they are one service. Each tells us when it is ready, and when all are, we tell systemd;
the watchdog is fed for as long as this process, which restarts the others, is alive.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence

from tenure.cli.config import child_environment, notify_address
from tenure.cli.output import note, paint
from tenure.cli.stopping import stopping_on_signals
from tenure.cli.supervise import Supervisor
from tenure.worker.events import Notifier


def run_herd(
    commands: Sequence[Sequence[str]], seen: Mapping[str, str], *, drain_s: float, once: bool
) -> int:
    """Run all commands until a signal, or with `once` until each has ended by itself.

    `seen` is what they see in their environment beside ours.
    """
    return asyncio.run(_run(commands, seen, drain_s, once))


async def _run(
    commands: Sequence[Sequence[str]], seen: Mapping[str, str], drain_s: float, once: bool
) -> int:
    address, watchdog_ms = notify_address()
    notifier = Notifier(address)
    stop = asyncio.Event()
    names = [f"worker{number}" for number in range(1, len(commands) + 1)]
    with Ear(len(names), notifier) as ear:
        environment = child_environment() | {"NOTIFY_SOCKET": ear.address, **seen}
        supervisor = Supervisor(note, environment, lambda text: paint(text, "dim", sys.stderr))
        with stopping_on_signals(stop, supervisor.hurry):
            for name, command in zip(names, commands, strict=True):
                await supervisor.start(name, [*command, "--parent", str(os.getpid())], once=once)
            beating = asyncio.create_task(_beat(notifier, watchdog_ms))
            try:
                await supervisor.until(stop)
            finally:
                beating.cancel()
                notifier.stopping()
                await asyncio.gather(*(supervisor.stop(name, drain_s + 10) for name in names))
                notifier.close()
    return supervisor.worst_exit


class Ear:
    """Hears READY from `count` children, as systemd would, and passes it on once."""

    def __init__(self, count: int, notifier: Notifier) -> None:
        self._count = count
        self._notifier = notifier
        self._ready = 0
        self.address = f"@tenure-{os.getpid()}-{secrets.token_hex(8)}"

    def __enter__(self) -> Ear:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._socket.bind("\0" + self.address[1:])
        asyncio.get_running_loop().add_reader(self._socket, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _heard(self) -> None:
        if b"READY=1" in self._socket.recv(4096):
            self._ready += 1
            if self._ready == self._count:
                self._notifier.ready(f"{self._count} worker processes")


async def _beat(notifier: Notifier, watchdog_ms: int) -> None:
    while watchdog_ms:
        notifier.watchdog()
        await asyncio.sleep(watchdog_ms / 2000)
