"""Telling systemd how the gateway is: ready, alive, stopping. Silent where there is no systemd."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tenure.worker.events import Notifier as Datagrams


class Notifier:
    """`address` is NOTIFY_SOCKET, `watchdog_ms` half of what systemd waits for."""

    def __init__(self, address: str = "", watchdog_ms: int = 0) -> None:
        self._datagrams = Datagrams(address)
        self._watchdog_ms = watchdog_ms if address else 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Notifier:
        """As systemd says it to a service of Type=notify with WatchdogSec=."""
        usec = environment.get("WATCHDOG_USEC", "")
        watchdog_ms = int(usec) // 2000 if usec.isdigit() else 0
        return cls(environment.get("NOTIFY_SOCKET", ""), watchdog_ms)

    def say(self, message: str) -> None:
        """Send one message; a supervisor that does not listen is no reason to fail."""
        self._datagrams.send(message)

    async def keep_alive(self) -> None:
        """Feed the watchdog from the event loop: a loop that hangs is restarted."""
        while self._watchdog_ms:
            self._datagrams.watchdog()
            await asyncio.sleep(self._watchdog_ms / 1000)
