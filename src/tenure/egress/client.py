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
    Refused,
    Target,
    TimedOut,
    TooLarge,
    Unreachable,
    read_target,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_HEADER_BYTES_MAX = 32_768
_BUFFER_BYTES_MAX = 262_144
_INFORMATIONAL_MAX = 199


class Connection(asyncio.Protocol):
    """Speaks with one peer, one exchange at a time."""

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
        self._header_bytes = 0
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._heard = self._headed = self._complete = self._paused = False
        self._kept_open = self._unasked = self._cut_short = False
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None

    @property
    def reusable(self) -> bool:
        """It is open, at rest, and nothing unasked came in."""
        return not self._closed and self._error is None and (self._complete or not self.exchanges)

    async def start(self, head: bytes, *, head_only: bool = False) -> None:
        """Send the head of a request (and its body, if it fits there)."""
        self._reset(head=head_only)
        self.exchanges += 1
        if self._closed:
            self._fail()
        self._transport.write(head)

    async def write(self, piece: bytes) -> bool:
        """Send a piece of the body; waits while the peer is slow.

        False when the peer has answered already: it wants no more of the body.
        """
        if self._headed:
            # What is missing of the body would be read as the next request.
            self._cut_short, self._kept_open = True, False
            return False
        if self._closed:
            self._fail()
        self._transport.write(piece)
        await self._writable.wait()
        return True

    async def answered(self) -> int:
        """Wait for status and headers."""
        while not self._headed:
            await self._more()
        return self.status

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        while True:
            while self._chunks:
                piece = self._chunks.popleft()
                self._buffered -= len(piece)
                if self._paused and self._buffered < _BUFFER_BYTES_MAX // 2:
                    self._paused = False
                    self._transport.resume_reading()
                yield piece
            if self._complete:
                return
            await self._more()

    def rest(self) -> bool:
        """Whether it may serve another request now; marks the moment."""
        self.idle_since_s = asyncio.get_running_loop().time()
        return self.reusable and self._complete and self._kept_open and not self._unasked

    def close(self) -> None:
        """Hang up."""
        self._closed = True
        self._transport.abort()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            self._fail()
        self._news = asyncio.get_running_loop().create_future()
        try:
            await self._news
        finally:
            self._news = None

    def _fail(self) -> None:
        stale = self.exchanges > 1 and not self._heard
        raise Disconnected(f"{self.origin} hung up before its answer was complete", stale=stale)

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._complete or not self.exchanges:
            self.close()  # nobody asked: an answer of this kind would be taken for the next one
            return
        self._heard = True
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
        self._tell()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if self._headed and not self._complete and not self._sized:
            self._complete = exc is None  # an answer without a length ends with its connection
        self._writable.set()
        self._tell()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # What the parser calls.

    @property
    def _sized(self) -> bool:
        return "content-length" in self.headers or "transfer-encoding" in self.headers

    def on_message_begin(self) -> None:
        self._unasked = self._complete  # a second answer to one request: none of it is read

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _HEADER_BYTES_MAX:
            raise TooLarge(f"{self.origin} answered with headers over {_HEADER_BYTES_MAX} bytes")
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._unasked:
            return
        self.status = self._parser.get_status_code()
        if self.status > _INFORMATIONAL_MAX:
            self._headed = True
            if self._head_only:  # its length is that of a body which does not come
                self._complete = True

    def on_body(self, body: bytes) -> None:
        if self._unasked:
            return
        self._chunks.append(body)
        self._buffered += len(body)
        if self._buffered > _BUFFER_BYTES_MAX and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.status > _INFORMATIONAL_MAX:
            self._complete = True
            self._kept_open = self._parser.should_keep_alive() and not self._cut_short
        else:
            self.headers.clear()  # 100 or 103 came first; the answer is still to come


_IDLE_S_MAX = 15.0
# A host that moved shall be looked up again even where its connections never idle.
_AGE_S_MAX = 120.0
_IDLE_TOTAL_MAX = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """How long an exchange may take in all, and how much of the answer is read."""

    connect_ms: int = 5_000
    total_ms: int = 15_000
    body_bytes_max: int = 16_384


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. Of a body over the limit only the beginning is here (`truncated`)."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer whose body is still to be read, piece by piece."""

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Body:
    """A request body that is sent in pieces; its length is said beforehand."""

    length: int
    pieces: AsyncIterable[bytes] = field(repr=False)


class Client:
    """One pool of connections; it belongs to the event loop that uses it."""

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
        self._idle: OrderedDict[Connection, tuple[str, str, int]] = OrderedDict()
        self._by_origin: dict[tuple[str, str, int], list[Connection]] = {}

    async def send(
        self,
        method: str,
        url: str,
        *,
        headers: Sequence[tuple[str, str]] = (),
        body: bytes = b"",
        limits: Limits | None = None,
    ) -> Response:
        """Make a request and read its answer, up to the byte limit."""
        bounds = limits or self._limits
        kept, size, truncated = [], 0, False
        async with self.open(method, url, headers=headers, body=body, limits=bounds) as answer:
            async for piece in answer.pieces:
                kept.append(piece[: bounds.body_bytes_max - size])
                size += len(piece)
                if size > bounds.body_bytes_max:
                    truncated = True  # the rest is not read: leaving early closes the connection
                    break
        return Response(answer.status, answer.headers, b"".join(kept), truncated)

    @asynccontextmanager
    async def open(
        self,
        method: str,
        url: str,
        *,
        headers: Sequence[tuple[str, str]] = (),
        body: bytes | Body = b"",
        limits: Limits | None = None,
    ) -> AsyncIterator[Answer]:
        """Make a request; inside the block its answer can be read piece by piece."""
        target = read_target(url)
        bounds = limits or self._limits
        connection: Connection | None = None
        try:
            async with asyncio.timeout(bounds.total_ms / 1000) as deadline:
                connection = await self._connected(target, bounds)
                await self._ask(connection, method, target, headers, body)
                yield Answer(connection.status, connection.headers, connection.pieces())
        except TimeoutError:
            if not deadline.expired():
                raise
            raise TimedOut(
                f"{target.origin} took longer than {bounds.total_ms / 1000:g} s"
            ) from None
        finally:
            if connection is not None:
                self._give_back(connection, target)

    async def close(self) -> None:
        """Hang up on everybody."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        self._by_origin.clear()
        await self._guard.close()

    async def _ask(
        self,
        connection: Connection,
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
            await _send_pieces(connection, body)
        await connection.answered()

    async def _connected(self, target: Target, bounds: Limits) -> Connection:
        idle = self._by_origin.get(_key(target))
        now_s = asyncio.get_running_loop().time()
        while idle:
            connection = idle.pop()  # the youngest: the others may rest and be dropped
            del self._idle[connection]
            if connection.reusable and not _too_old(connection, now_s):
                return connection
            connection.close()
        return await self._dial(target, bounds)

    async def _dial(self, target: Target, bounds: Limits) -> Connection:
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
                # Not its own words: they name the address, which may be an internal one.
                problem = os.strerror(error.errno) if error.errno else type(error).__name__
        raise Unreachable(f"{target.origin} could not be reached: {problem}")

    async def _connect(self, target: Target, address: str) -> Connection:
        secure = target.scheme == "https"
        if secure and self._tls is None:
            self._tls = ssl.create_default_context()
        _, protocol = await asyncio.get_running_loop().create_connection(
            lambda: Connection(target.origin),
            address,
            target.port,
            ssl=self._tls if secure else None,
            server_hostname=target.host if secure else None,
        )
        return protocol

    def _give_back(self, connection: Connection, target: Target) -> None:
        if not connection.rest():
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


async def _send_pieces(connection: Connection, body: Body) -> None:
    sent = 0
    async for piece in body.pieces:
        sent += len(piece)
        if sent > body.length:
            break
        if not await connection.write(piece):
            return
    if sent != body.length:
        connection.close()
        raise TooLarge(f"the request body has not the {body.length} bytes that were announced")


def _head(method: str, target: Target, headers: Sequence[tuple[str, str]], length: int) -> bytes:
    lines = [f"{method} {target.path} HTTP/1.1", f"Host: {target.authority}"]
    for name, value in headers:
        if "\r" in value or "\n" in value or "\0" in value:
            raise Refused(f"the header {name!r} holds a line break")
        lines.append(f"{name}: {value}")
    if length or method in ("POST", "PUT", "PATCH"):
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _key(target: Target) -> tuple[str, str, int]:
    return target.scheme, target.host, target.port


def _too_old(connection: Connection, now_s: float) -> bool:
    return now_s - connection.idle_since_s > _IDLE_S_MAX or now_s - connection.born_s > _AGE_S_MAX
