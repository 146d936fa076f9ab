"""Tells systemd how we are: READY, STOPPING, WATCHDOG. Does nothing without a notify socket."""

from __future__ import annotations

import socket


class Notifier:
    """Sends datagrams to the socket that `NOTIFY_SOCKET` names; `@` begins an abstract name."""

    __slots__ = ("_address", "_socket")

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def send(self, state: str) -> None:
        """A manager that does not listen must not hurt the worker, so failures are ignored."""
        if self._socket is not None:
            try:
                self._socket.sendto(state.encode(), self._address)
            except OSError:
                return

    def ready(self, status: str) -> None:
        """Every store has answered once."""
        self.send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """No more claims; what runs is being finished."""
        self.send("STOPPING=1\nSTATUS=draining")

    def watchdog(self) -> None:
        """Loop and keeper are alive."""
        self.send("WATCHDOG=1")

    def close(self) -> None:
        """Let go of the socket."""
        if self._socket is not None:
            self._socket.close()
