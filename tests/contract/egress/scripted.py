"""A server that answers with exactly the bytes it was given, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

Reply = Callable[[bytes, bytes], bytes | None]
"""Head and body of a request to the bytes of an answer; None hangs up."""


class Scripted:
    """`heads` and `bodies` of all requests; `connections` opened so far."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.connections = 0
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.port = 0
        self.names: list[str | None] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(_length(head))
                self.heads.append(head)
                self.bodies.append(body)
                answer = self._reply(head, body)
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the peer, or the test, is done
        finally:
            writer.close()


@asynccontextmanager
async def scripted(reply: Reply, tls: ssl.SSLContext | None = None) -> AsyncIterator[Scripted]:
    made = Scripted(reply)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0
