"""Workers of a control plane on bare asyncio protocols: one claim, one complete, over and over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import msgspec

from load.answers import whole

CONNECTING_AT_ONCE = 100
_HEAD = "POST /internal/worker/%s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n"


@dataclass(slots=True)
class Workers:
    """Many workers, each with a connection and one request in flight.

    `finish` is called after each complete; a worker goes on with the next claim until `stopping`.
    """

    place: str
    wait_ms: int
    taken: Callable[[Any], None] = lambda lease: None
    finish: Callable[[], None] = lambda: None
    stopping: bool = False
    refused: str = ""
    _transports: list[asyncio.BaseTransport] = field(default_factory=list)

    async def connect(self, count: int) -> None:
        """All of them; each sends its first claim at once."""
        host, _, port = self.place.partition(":")
        numbers = iter(range(count))

        async def some() -> None:
            loop = asyncio.get_running_loop()
            for number in numbers:
                make = partial(_Worker, self, f"worker-{number}")
                transport, _ = await loop.create_connection(make, host, int(port))
                self._transports.append(transport)

        await asyncio.gather(*(some() for _ in range(CONNECTING_AT_ONCE)))

    def close(self) -> None:
        self.stopping = True
        for transport in self._transports:
            transport.abort()  # type: ignore[attr-defined]


class _Worker(asyncio.Protocol):
    def __init__(self, crowd: Workers, name: str) -> None:
        self._crowd = crowd
        self._name = name
        self._unread = b""
        self._claiming = False
        self._transport: asyncio.Transport | None = None
        self._heads = {verb: _HEAD % (verb, crowd.place) for verb in ("claim", "complete")}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._claim()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._crowd.stopping:
            self._crowd.refused = f"the plane closed a connection: {exc or 'EOF'}"

    def data_received(self, data: bytes) -> None:
        self._unread += data
        answer = whole(self._unread)
        if answer is None:
            return
        head, body = answer
        self._unread = b""
        if not head.startswith(b"HTTP/1.1 200"):
            self._crowd.refused = (head[:60] + body[:300]).decode(errors="replace")
        elif self._claiming:
            self._claimed(msgspec.json.decode(body))
        else:
            if b'"ok":true' not in body:
                self._crowd.refused = body.decode(errors="replace")
            self._crowd.finish()
            self._claim()

    def _claimed(self, lease: Any) -> None:
        if not lease["claimed"]:
            self._claim()
            return
        self._crowd.taken(lease)
        named = {name: lease[name] for name in ("job_id", "attempt_id", "lease_token", "stream")}
        self._send("complete", {"worker_id": self._name, **named, "result": None})

    def _claim(self) -> None:
        if not self._crowd.stopping:
            body = {"worker_id": self._name, "streams": [], "max_wait_ms": self._crowd.wait_ms}
            self._send("claim", body)

    def _send(self, verb: str, body: Any) -> None:
        assert self._transport is not None
        self._claiming = verb == "claim"
        raw = msgspec.json.encode(body)
        head = f"{self._heads[verb]}Content-Length: {len(raw)}\r\n\r\n"
        self._transport.write(head.encode() + raw)


async def pairs(place: str, *, count: int, workers: int, within_s: float = 120) -> float:
    """The seconds that `count` jobs take, each claimed and completed by calls of its own."""
    done = asyncio.Event()
    left = count

    def finish() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            done.set()

    crowd = Workers(place, wait_ms=1_000, finish=finish)
    began = time.perf_counter()
    await crowd.connect(workers)
    await _until(done, crowd, within_s)
    took = time.perf_counter() - began
    crowd.close()
    return took


async def _until(done: asyncio.Event, crowd: Workers, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not done.is_set():
            if crowd.refused:
                raise RuntimeError(crowd.refused)
            await asyncio.wait({asyncio.ensure_future(done.wait())}, timeout=0.2)
