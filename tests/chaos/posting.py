"""The smallest HTTP client that can tell a request that never left from an answer that was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

ANSWER_WITHIN_S = 15.0


class NotSent(Exception):
    """Nobody took the connection: nothing was executed."""


class AnswerLost(Exception):
    """The request left, and no whole answer came."""


class Poster:
    """One kept connection to a gateway on this machine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, Any]:
        """The status and the decoded body of the answer."""
        reader, writer = await self._connected()
        head = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{self._port}"]
        head += [f"{name}: {value}" for name, value in headers.items()]
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
        try:
            writer.write("\r\n".join(head).encode() + body)
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await self._answer(reader)
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise AnswerLost(repr(error)) from None

    def close(self) -> None:
        """Drop the connection."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            try:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError as error:
                raise NotSent(repr(error)) from None
        return self._streams

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, Any]:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(fields.get("content-length", "0")))
        if fields.get("connection") == "close":
            self.close()
        return int(head[0].split(" ")[1]), msgspec.json.decode(body) if body else None
