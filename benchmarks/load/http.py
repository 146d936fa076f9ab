"""POST the same request over keep-alive connections, each with one request in flight."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import cast

from load.answers import whole


@dataclass(slots=True)
class LoadResult:
    """What the server did: how long in all, how long each request, which statuses."""

    seconds: float
    latencies_ms: list[float]
    statuses: Counter[int]


@dataclass(slots=True)
class _Work:
    """The requests still to be sent, shared by all connections."""

    request: bytes
    left: int
    finished: asyncio.Future[None]
    unanswered: int
    latencies_ms: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)


class _Poster(asyncio.Protocol):
    def __init__(self, work: _Work) -> None:
        self._work = work
        self._unread = b""
        self._sent_s = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._next()

    def data_received(self, data: bytes) -> None:
        self._unread += data
        answer = whole(self._unread)
        if answer is None:
            return
        head, _ = answer
        self._unread = b""
        work = self._work
        work.latencies_ms.append((time.perf_counter() - self._sent_s) * 1000)
        work.statuses[int(head[9:12])] += 1
        work.unanswered -= 1
        if work.unanswered == 0 and not work.finished.done():
            work.finished.set_result(None)
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._work.finished.done():
            lost = ConnectionError(f"the server closed a connection under load: {exc or 'EOF'}")
            self._work.finished.set_exception(lost)

    def _next(self) -> None:
        assert self._transport is not None
        if self._work.left > 0:
            self._work.left -= 1
            self._sent_s = time.perf_counter()
            self._transport.write(self._work.request)


async def post(
    host: str,
    port: int,
    path: str,
    body: bytes,
    *,
    count: int,
    connections: int,
    within_s: float = 300,
) -> LoadResult:
    """`count` equal requests over `connections` connections; raises when one breaks or stalls."""
    loop = asyncio.get_running_loop()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    work = _Work(head.encode() + body, count, loop.create_future(), count)
    began = time.perf_counter()
    opened = [
        await loop.create_connection(lambda: _Poster(work), host, port) for _ in range(connections)
    ]
    async with asyncio.timeout(within_s):
        await work.finished
    took = time.perf_counter() - began
    for transport, _ in opened:
        transport.abort()
    return LoadResult(took, work.latencies_ms, work.statuses)
