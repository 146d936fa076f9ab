"""Ports for servers that a test starts, and starts again."""

from __future__ import annotations

import random
import socket

PORTS = (15_000, 32_000)
_chance = random.SystemRandom()  # a seed of the test's must not give two processes the same


def free_port() -> int:
    """A port that is free now, and that no outgoing connection of this machine will be given.

    Clients knock while a server is down: from within the kernel's own range one of them could get
    the server's port as its source and keep the server from coming back.
    """
    for _ in range(1000):
        port = _chance.randrange(*PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port between {PORTS[0]} and {PORTS[1]}")
