"""A contender's gateway as a child: started as its users start it, on a free port."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import Any

from harness.adapter import Peer, PeerError
from harness.server import free_port

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where it listens, its process, and what the adapter said of it."""

    pid: int
    port: int
    told: dict[str, Any]


def start_gateway(peer: Peer, *, within_s: float = 30) -> Gateway:
    """Start it and wait until it accepts connections."""
    port = free_port()
    told = peer.ask("gateway", port=port)
    child = peer.start(told["argv"], told.get("env", {}))
    deadline = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection((HOST, port), timeout=1).close()
        except OSError:
            if child.poll() is not None or time.monotonic() > deadline:
                raise PeerError(f"{peer.name}: its gateway does not answer{peer.tail()}") from None
            time.sleep(0.05)
        else:
            return Gateway(child.pid, port, told)
