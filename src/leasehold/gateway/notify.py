"""Telling systemd how the gateway is: ready, alive, stopping. Silent where there is no systemd."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping


class Notifier:
    """`address` is NOTIFY_SOCKET, `watchdog_ms` half of what systemd waits for."""

    def __init__(self, address: str = "", watchdog_ms: int = 0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_ms = watchdog_ms

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Notifier:
        """As systemd says it to a service of Type=notify with WatchdogSec=."""
        usec = environment.get("WATCHDOG_USEC", "")
        watchdog_ms = int(usec) // 2000 if usec.isdigit() else 0
        return cls(environment.get("NOTIFY_SOCKET", ""), watchdog_ms)

    def say(self, message: str) -> None:
        """Send one message; a supervisor that does not listen is no reason to fail."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                sock.sendto(message.encode(), self._address)
        except OSError:
            return

    async def keep_alive(self) -> None:
        """Feed the watchdog from the event loop: a loop that hangs is restarted."""
        while self._address and self._watchdog_ms:
            self.say("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_ms / 1000)
