"""A wire to PostgreSQL that executes a statement and loses its answer.

It knows just enough of the protocol: a client's messages after the first carry a type and a length,
`P` prepares a statement under a name, `B` binds it, `E` executes it, `Q` is a text such as `BEGIN`,
and the server's `Z` says that all of it is done. In a transaction the answer to its commit is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self
from urllib.parse import urlsplit, urlunsplit

_SSL_REQUEST = 80877103


class PostgresProxy:
    """Forwards connections; `drop_reply` makes the next executed statement go unanswered."""

    def __init__(self, server_url: str) -> None:
        self._target = urlsplit(server_url)
        self._armed = False
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.dropped = 0

    async def start(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    @property
    def url(self) -> str:
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        user = f"{self._target.username}:{self._target.password}@"
        return urlunsplit(self._target._replace(netloc=f"{user}127.0.0.1:{port}"))

    def drop_reply(self) -> None:
        self._armed = True

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await _Link(self, reader, writer).run(self._target.hostname, self._target.port)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    def takes_the_reply(self, statement: bytes) -> bool:
        """Whether this executed statement is the one that goes unanswered; ours work on jobs, or
        on the records beside a queue."""
        if b"_jobs" not in statement and b"queue_records" not in statement:
            return False
        taken, self._armed = self._armed, False
        self.dropped += taken
        return taken


class _Link:
    """One client and its server."""

    def __init__(
        self, proxy: PostgresProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._client, self._answers = reader, writer
        self._swallow = False
        self._prepared: dict[bytes, bytes] = {}
        self._bound = b""
        self._in_transaction = self._loses_commit = False

    async def run(self, host: str | None, port: int | None) -> None:
        server, out = await asyncio.open_connection(host, port)
        try:
            await self._first(server, out)
            sides = [
                asyncio.create_task(self._upwards(out)),
                asyncio.create_task(self._downwards(server)),
            ]
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)
        finally:
            out.close()

    async def _first(self, server: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        """The first message has no type; a wish for TLS is answered before it comes."""
        while True:
            head = await self._client.readexactly(4)
            body = await self._client.readexactly(int.from_bytes(head, "big") - 4)
            out.write(head + body)
            if int.from_bytes(body[:4], "big") != _SSL_REQUEST:
                return
            self._answers.write(await server.readexactly(1))

    async def _upwards(self, out: asyncio.StreamWriter) -> None:
        while True:
            head = await self._client.readexactly(5)
            body = await self._client.readexactly(int.from_bytes(head[1:], "big") - 4)
            if head[:1] == b"P":
                name, text, _ = body.split(b"\0", 2)
                self._prepared[name] = text
            elif head[:1] == b"B":
                _, name, _ = body.split(b"\0", 2)
                self._bound = self._prepared.get(name, b"")
            elif head[:1] == b"E" and self._proxy.takes_the_reply(self._bound):
                self._swallow = not self._in_transaction
                self._loses_commit = self._in_transaction
            elif head[:1] == b"Q":
                self._in_transaction = body.startswith(b"BEGIN")
                self._swallow = self._loses_commit and body.startswith(b"COMMIT")
                self._loses_commit = False
            out.write(head + body)
            await out.drain()

    async def _downwards(self, server: asyncio.StreamReader) -> None:
        while True:
            head = await server.readexactly(5)
            body = await server.readexactly(int.from_bytes(head[1:], "big") - 4)
            if self._swallow:
                if head[:1] == b"Z":
                    with contextlib.suppress(OSError):
                        self._answers.transport.abort()
                    return
                continue
            self._answers.write(head + body)
            await self._answers.drain()
