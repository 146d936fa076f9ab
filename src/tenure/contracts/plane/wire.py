"""HTTP/1.1 for workers: POST JSON over connections that are kept, and honest errors.

Nothing is sent twice from here: an answer that did not come is `ReplyLost`, and the caller, whose
calls carry ids and fences, decides. A connection that the plane closed while nobody used it is not
used again.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

from tenure.core.errors import ReplyLost, StoreUnreachable, UsageError

CONNECT_TIMEOUT_S = 5.0
_HEAD_BYTES_MAX = 64 * 1024
_BODY_BYTES_MAX = 256 << 20


class Http:
    """Connections to one address, for one event loop."""

    def __init__(
        self, url: str, *, headers: Mapping[str, str], tls: ssl.SSLContext | None = None
    ) -> None:
        parts = urlsplit(url)
        if not parts.hostname:
            raise UsageError(f"{url!r} names no host; write plane+http://host:8470")
        self.place = f"{parts.scheme}://{parts.hostname}:{parts.port or _port(parts.scheme)}"
        self._host = parts.hostname
        self._port = parts.port or _port(parts.scheme)
        self._tls = tls
        self._path = parts.path.rstrip("/")
        name = parts.netloc.rpartition("@")[2]
        lines = {"host": name, "content-type": "application/json", **headers}
        self._head = "".join(f"{key}: {value}\r\n" for key, value in lines.items())
        self._idle: list[_Connection] = []
        self._closed = False

    async def post(self, path: str, body: bytes, *, timeout_s: float) -> tuple[int, bytes]:
        """The status and the body of the answer."""
        connection = await self._take()
        head = (
            f"POST {self._path}{path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
        )
        done = False
        try:
            async with asyncio.timeout(timeout_s):
                answer = await connection.exchange(head.encode("latin-1") + body)
            done = True
            return answer
        except TimeoutError:
            raise ReplyLost(f"{self.place} did not answer {path} in {timeout_s:.0f} s") from None
        except (OSError, ValueError) as error:
            raise ReplyLost(f"the connection to {self.place} broke: {error}") from error
        finally:
            if done and connection.is_reusable and not self._closed:
                self._idle.append(connection)
            else:
                connection.abort()

    async def close(self) -> None:
        """Close every connection."""
        self._closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort()

    async def _take(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, protocol = await loop.create_connection(
                    _Connection, self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            raise StoreUnreachable(
                f"the plane at {self.place} cannot be reached: {error!r}"
            ) from error
        return protocol


class _Connection(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._read = bytearray()
        self._needs = 0
        self.is_reusable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.is_reusable = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("closed without an answer"))

    def eof_received(self) -> bool:
        return False

    async def exchange(self, request: bytes) -> tuple[int, bytes]:
        """Send a request and wait for its answer."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionError("closed before the request")
        self._answer = asyncio.get_running_loop().create_future()
        self._read.clear()
        self._needs = 0
        self._transport.write(request)
        return await self._answer

    def abort(self) -> None:
        """Close at once."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.abort()  # nobody asked for this
            return
        self._read += data
        if len(self._read) < self._needs:
            return
        try:
            answer = self._whole()
        except ValueError as error:
            self._answer.set_exception(error)
            self.abort()
            return
        if answer is not None:
            self._answer.set_result(answer)

    def _whole(self) -> tuple[int, bytes] | None:
        """The answer, if all of it is there."""
        end = self._read.find(b"\r\n\r\n")
        if end < 0:
            if len(self._read) > _HEAD_BYTES_MAX:
                raise ValueError("the answer has no end of its head")
            return None
        first, *lines = bytes(self._read[:end]).decode("latin-1").split("\r\n")
        fields = dict(_field(line) for line in lines)
        if fields.get("connection", "").lower() == "close":
            self.is_reusable = False
        status = int(first.split(" ", 2)[1])
        body = self._read[end + 4 :]
        if fields.get("transfer-encoding", "").lower() == "chunked":
            whole = _dechunked(bytes(body))
            return None if whole is None else (status, whole)
        length = int(fields.get("content-length", "0"))
        if length > _BODY_BYTES_MAX:
            raise ValueError(f"the answer has {length} bytes")
        if len(body) < length:
            self._needs = end + 4 + length
            return None
        return status, bytes(body[:length])


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()


def _dechunked(data: bytes) -> bytes | None:
    """A chunked body put together; None while some of it is missing. Proxies answer so."""
    parts: list[bytes] = []
    at = 0
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return None
        size = int(data[at:end].partition(b";")[0], 16)
        if len(data) < end + 2 + size + 2:
            return None
        if size == 0:
            return b"".join(parts)
        parts.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


def _port(scheme: str) -> int:
    return 443 if scheme == "https" else 80
