"""A receiver on loopback that verifies what it gets and counts effects once an event."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httptools

from tenure.webhooks import InvalidWebhook, MemoryNonces, Verified, verify

Misbehave = Callable[[Verified, int], int | None]
"""An event and how often it was delivered to the status to answer; None never answers."""


@dataclass
class Receiver:
    """`effects` by event id, `deliveries` in order, `refused` by reason."""

    secrets: list[str]
    misbehave: Misbehave
    effects: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    deliveries: list[Verified] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    heads: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0
    patience: int = 0  # requests a connection, after which it hangs up; 0: any number
    port: int = 0
    nonces: MemoryNonces = field(default_factory=MemoryNonces)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    async def answer(self, headers: dict[str, str], body: bytes) -> int | None:
        self.heads.append(headers)
        try:
            verified = await verify(body, headers, self.secrets, nonces=self.nonces)
        except InvalidWebhook as error:
            self.refused[error.reason] += 1
            return 401
        self.deliveries.append(verified)
        self.seen[verified.event_id] += 1
        status = self.misbehave(verified, self.seen[verified.event_id])
        if (status is None or status < 300) and not self.effects[verified.event_id]:
            self.effects[verified.event_id] += 1
        return status


class _Connection(asyncio.Protocol):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._tasks: set[asyncio.Task[None]] = set()
        self._served = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._receiver.connections += 1
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._headers: dict[str, str] = {}
        self._body = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._served += 1
        if 0 < self._receiver.patience < self._served:
            self._transport.close()
            return
        task = asyncio.get_running_loop().create_task(self._answer(self._headers, self._body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, headers: dict[str, str], body: bytes) -> None:
        status = await self._receiver.answer(headers, body)
        if status is not None and not self._transport.is_closing():
            self._transport.write(b"HTTP/1.1 %d -\r\nContent-Length: 0\r\n\r\n" % status)


@asynccontextmanager
async def receiver(
    secrets: list[str], misbehave: Misbehave = lambda event, seen: 204
) -> AsyncIterator[Receiver]:
    made = Receiver(secrets, misbehave)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(made), "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
