"""An HTTP/1.1 client that connects only to addresses the guard has checked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections import OrderedDict, deque
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import httptools

from tenure.egress.guard import (
    Disconnected,
    Guard,
    RequestRefused,
    RequestTimedOut,
    Target,
    TooLarge,
    Unreachable,
    read_target,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_HEADER_BYTES_MAX = 32_768
_BUFFER_BYTES_MAX = 262_144
_INFORMATIONAL_MAX = 199
_INFORMATIONAL_COUNT_MAX = 10


class _PeerConnection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.exchanges = 0
        self.born_s = self.idle_since_s = asyncio.get_running_loop().time()
        self._transport: asyncio.Transport
        self._closed = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._reset(head=False)

    def _reset(self, *, head: bool) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._head_only = head
        self.status = 0
        self.headers: dict[str, str] = {}
        self._header_bytes = self._informational = 0
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._received = self._has_head = self._complete = self._paused = False
        self._keep_alive = self._unexpected = self._body_cut = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def reusable(self) -> bool:
        """Whether it is open and idle, and has received nothing unexpected."""
        return not self._closed and self._error is None and (self._complete or not self.exchanges)

    async def start(self, head: bytes, *, head_only: bool = False) -> None:
        """Send the head of a request, with a body that is in memory."""
        self._reset(head=head_only)
        self.exchanges += 1
        if self._closed:
            self._fail()
        self._transport.write(head)

    async def write(self, chunk: bytes) -> bool:
        """Send a chunk of the body; waits while the peer is slow.

        False if the peer has already answered, and needs no more of the body.
        """
        if self._has_head:
            # On a reused connection the peer would take the next request for the missing body.
            self._body_cut, self._keep_alive = True, False
            return False
        if self._closed:
            self._fail()
        self._transport.write(chunk)
        await self._writable.wait()
        return True

    async def wait_head(self) -> int:
        """Wait for status and headers of the response."""
        while not self._has_head:
            await self._wait_data()
        return self.status

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives."""
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                self._buffered -= len(chunk)
                if self._paused and self._buffered < _BUFFER_BYTES_MAX // 2:
                    self._paused = False
                    self._transport.resume_reading()
                yield chunk
            if self._complete:
                return
            await self._wait_data()

    def make_idle(self) -> bool:
        """Whether the connection may be used for another request; stores the time."""
        self.idle_since_s = asyncio.get_running_loop().time()
        return self.reusable and self._complete and self._keep_alive and not self._unexpected

    def close(self) -> None:
        """Close at once."""
        self._closed = True
        self._transport.abort()

    async def _wait_data(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            self._fail()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _fail(self) -> None:
        stale = self.exchanges > 1 and not self._received
        raise Disconnected(f"{self.origin} hung up before its answer was complete", stale=stale)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._complete or not self.exchanges:
            self.close()  # unexpected: it would be taken for the response to the next request
            return
        self._received = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            held = error.__context__
            self._error = (
                held
                if isinstance(held, TooLarge)
                else Disconnected(f"{self.origin} did not answer in HTTP/1.1")
            )
            self.close()
        self._wake()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if self._has_head and not self._complete and not self._has_length:
            self._complete = exc is None  # a response without a length ends with the connection
        self._writable.set()
        self._wake()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # Called by the parser.

    @property
    def _has_length(self) -> bool:
        return "content-length" in self.headers or "transfer-encoding" in self.headers

    def on_message_begin(self) -> None:
        self._unexpected = self._complete  # a second response to one request is ignored

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _HEADER_BYTES_MAX:
            raise TooLarge(f"{self.origin} answered with headers over {_HEADER_BYTES_MAX} bytes")
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._unexpected:
            return
        self.status = self._parser.get_status_code()
        if self.status > _INFORMATIONAL_MAX:
            self._has_head = True
            if self._head_only:  # content-length is that of a body that is not sent
                self._complete = True

    def on_body(self, body: bytes) -> None:
        if self._unexpected:
            return
        self._chunks.append(body)
        self._buffered += len(body)
        if self._buffered > _BUFFER_BYTES_MAX and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.status > _INFORMATIONAL_MAX:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive() and not self._body_cut
        else:
            self.headers.clear()  # 100 or 103; the final response follows
            self._informational += 1
            if self._informational > _INFORMATIONAL_COUNT_MAX:
                raise TooLarge(f"{self.origin} goes on with informational responses")


_IDLE_S_MAX = 15.0
# A host may get another address, so it is resolved again even if its connections are never idle.
_AGE_S_MAX = 120.0
_IDLE_TOTAL_MAX = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """How long an exchange may take, and how many bytes of the response are read."""

    connect_ms: int = 5_000
    total_ms: int = 15_000
    body_bytes_max: int = 16_384


@dataclass(frozen=True, slots=True)
class Response:
    """A response. A body over the limit is cut off (`truncated`)."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class StreamedResponse:
    """A response whose body is read chunk by chunk."""

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Body:
    """A request body that is sent in chunks; its length is known beforehand."""

    length: int
    chunks: AsyncIterable[bytes] = field(repr=False)


class Client:
    """A connection pool; belongs to the event loop that uses it."""

    def __init__(
        self,
        guard: Guard | None = None,
        *,
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._guard = guard or Guard()
        self._limits = limits or Limits()
        self._tls = tls
        self._idle: OrderedDict[_PeerConnection, tuple[str, str, int]] = OrderedDict()
        self._by_origin: dict[tuple[str, str, int], list[_PeerConnection]] = {}

    async def send(
        self,
        method: str,
        url: str,
        *,
        headers: Sequence[tuple[str, str]] = (),
        body: bytes = b"",
        limits: Limits | None = None,
    ) -> Response:
        """Make a request and read its response, up to the byte limit."""
        bounds = limits or self._limits
        chunks, size, truncated = [], 0, False
        async with self.open(method, url, headers=headers, body=body, limits=bounds) as answer:
            async for chunk in answer.chunks:
                chunks.append(chunk[: bounds.body_bytes_max - size])
                size += len(chunk)
                if size > bounds.body_bytes_max:
                    truncated = True  # the rest is not read; the connection will be closed
                    break
        return Response(answer.status, answer.headers, b"".join(chunks), truncated)

    @asynccontextmanager
    async def open(
        self,
        method: str,
        url: str,
        *,
        headers: Sequence[tuple[str, str]] = (),
        body: bytes | Body = b"",
        limits: Limits | None = None,
    ) -> AsyncIterator[StreamedResponse]:
        """Make a request; within the block its response can be read chunk by chunk."""
        target = read_target(url)
        bounds = limits or self._limits
        connection: _PeerConnection | None = None
        try:
            async with asyncio.timeout(bounds.total_ms / 1000) as deadline:
                connection = await self._acquire(target, bounds)
                await self._request(connection, method, target, headers, body)
                yield StreamedResponse(connection.status, connection.headers, connection.chunks())
        except TimeoutError:
            if not deadline.expired():
                raise
            raise RequestTimedOut(
                f"{target.origin} took longer than {bounds.total_ms / 1000:g} s"
            ) from None
        finally:
            if connection is not None:
                self._release(connection, target)

    async def close(self) -> None:
        """Close all connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        self._by_origin.clear()
        await self._guard.close()

    async def _request(
        self,
        connection: _PeerConnection,
        method: str,
        target: Target,
        headers: Sequence[tuple[str, str]],
        body: bytes | Body,
    ) -> None:
        length = body.length if isinstance(body, Body) else len(body)
        head = _head(method, target, headers, length)
        inline = body if isinstance(body, bytes) else b""
        await connection.start(head + inline, head_only=method == "HEAD")
        if isinstance(body, Body):
            await _send_chunks(connection, body)
        await connection.wait_head()

    async def _acquire(self, target: Target, bounds: Limits) -> _PeerConnection:
        idle = self._by_origin.get(_key(target))
        now_s = asyncio.get_running_loop().time()
        while idle:
            connection = idle.pop()  # the newest; the others can expire
            del self._idle[connection]
            if connection.reusable and not _is_too_old(connection, now_s):
                return connection
            connection.close()
        return await self._dial(target, bounds)

    async def _dial(self, target: Target, bounds: Limits) -> _PeerConnection:
        """Connect to one of the addresses that the guard has just checked."""
        addresses = await self._guard.addresses(target)
        share_s = bounds.connect_ms / 1000 / len(addresses)
        problem = "no address"
        for address in addresses:
            try:
                async with asyncio.timeout(share_s):
                    return await self._connect(target, address)
            except TimeoutError:
                problem = "no answer in time"
            except ssl.SSLCertVerificationError as error:
                raise Unreachable(
                    f"{target.origin}: its certificate does not hold ({error.verify_message})"
                ) from None
            except OSError as error:
                # Not the message: it has the address, which may be an internal one.
                problem = os.strerror(error.errno) if error.errno else type(error).__name__
        raise Unreachable(f"{target.origin} could not be reached: {problem}")

    async def _connect(self, target: Target, address: str) -> _PeerConnection:
        secure = target.scheme == "https"
        if secure and self._tls is None:
            self._tls = ssl.create_default_context()
        _, protocol = await asyncio.get_running_loop().create_connection(
            lambda: _PeerConnection(target.origin),
            address,
            target.port,
            ssl=self._tls if secure else None,
            server_hostname=target.host if secure else None,
        )
        return protocol

    def _release(self, connection: _PeerConnection, target: Target) -> None:
        if not connection.make_idle():
            connection.close()
            return
        key = _key(target)
        self._idle[connection] = key
        self._by_origin.setdefault(key, []).append(connection)
        while len(self._idle) > _IDLE_TOTAL_MAX:
            oldest, its_key = self._idle.popitem(last=False)
            with contextlib.suppress(ValueError):
                self._by_origin[its_key].remove(oldest)
            oldest.close()


async def _send_chunks(connection: _PeerConnection, body: Body) -> None:
    sent = 0
    async for chunk in body.chunks:
        sent += len(chunk)
        if sent > body.length:
            break
        if not await connection.write(chunk):
            return
    if sent != body.length:
        connection.close()
        raise TooLarge(f"the request body has not the {body.length} bytes that were announced")


def _head(method: str, target: Target, headers: Sequence[tuple[str, str]], length: int) -> bytes:
    lines = [f"{method} {target.path} HTTP/1.1", f"Host: {target.authority}"]
    for name, value in headers:
        if "\r" in value or "\n" in value or "\0" in value:
            raise RequestRefused(f"the header {name!r} holds a line break")
        lines.append(f"{name}: {value}")
    if length or method in ("POST", "PUT", "PATCH"):
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _key(target: Target) -> tuple[str, str, int]:
    return target.scheme, target.host, target.port


def _is_too_old(connection: _PeerConnection, now_s: float) -> bool:
    return now_s - connection.idle_since_s > _IDLE_S_MAX or now_s - connection.born_s > _AGE_S_MAX
