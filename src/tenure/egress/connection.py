"""One HTTP/1.1 connection to a checked address: a request goes out, an answer comes in pieces.

The parser is llhttp (by `httptools`). Reading stops while nobody takes the pieces, so an answer of
any size needs little memory. A connection that ended an exchange cleanly may serve the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from tenure.egress.errors import Disconnected, TooLarge

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
