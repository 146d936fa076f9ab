"""Thousands of clients of server-sent events in one process; each event carries its send time."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

STAMP = re.compile(rb'"t": ?(\d+)')
CONNECTING_AT_ONCE = 100


@dataclass(slots=True)
class Crowd:
    """What all clients together have seen."""

    waits_ms: list[float] = field(default_factory=list)
    greeted: int = 0
    lost: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    _transports: list[asyncio.BaseTransport] = field(default_factory=list)
    _closing: bool = False

    async def connect(
        self, host: str, port: int, paths: Sequence[str], *, within_s: float
    ) -> float:
        """Open one stream a path and wait for every `hello`; answers the seconds it took."""
        began = time.monotonic()
        remaining = iter(paths)
        async with asyncio.timeout(within_s):
            await asyncio.gather(
                *(self._connect_some(host, port, remaining) for _ in range(CONNECTING_AT_ONCE))
            )
        return time.monotonic() - began

    async def _connect_some(self, host: str, port: int, paths: Iterator[str]) -> None:
        loop = asyncio.get_running_loop()
        for path in paths:
            make = partial(_Client, self, f"{host}:{port}", path)
            transport, client = await loop.create_connection(make, host, port)
            self._transports.append(transport)
            await client.answered

    def close(self) -> None:
        self._closing = True
        for transport in self._transports:
            transport.close()

    def saw(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        self.waits_ms += [(now_ns - int(sent_ns)) / 1e6 for sent_ns in STAMP.findall(data)]

    def ended(self) -> None:
        self.lost += not self._closing


class _Client(asyncio.Protocol):
    def __init__(self, crowd: Crowd, host: str, path: str) -> None:
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._crowd = crowd
        self._request = (
            f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAccept: text/event-stream\r\n\r\n"
        ).encode()
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        whole, newline, rest = (self._unread + data).rpartition(b"\n")
        self._unread = rest
        if not self.answered.done():
            self._greet(whole)
        if newline:
            self._crowd.saw(whole)

    def _greet(self, seen: bytes) -> None:
        if seen.startswith(b"HTTP/1.1 ") and not seen.startswith(b"HTTP/1.1 200"):
            status = seen[9:12].decode()
            self._crowd.refused[status] = self._crowd.refused.get(status, 0) + 1
            self.answered.set_result(None)
        elif b"event: hello" in seen:
            self._crowd.greeted += 1
            self.answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.ended()
        if not self.answered.done():
            self.answered.set_result(None)
