"""A server on loopback that nobody should reach, and counts who does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Canary:
    """Counts connections on 127.0.0.1 and, where the machine has it, on ::1 at one port."""

    def __init__(self) -> None:
        self.hits = 0
        self.port = 0

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.hits += 1
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the peer, or the test, is done
        finally:
            writer.close()


@asynccontextmanager
async def canary() -> AsyncIterator[Canary]:
    made = Canary()
    first = await asyncio.start_server(made._met, "127.0.0.1", 0)
    made.port = first.sockets[0].getsockname()[1]
    servers = [first]
    with contextlib.suppress(OSError):  # a machine without IPv6 cannot be reached that way
        servers.append(await asyncio.start_server(made._met, "::1", made.port))
    try:
        yield made
    finally:
        for server in servers:
            server.close()
