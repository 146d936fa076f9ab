"""Connections of clients: uvicorn's protocol, bounded in bytes, in time and in number.

A connection that waits for its client has a deadline: for the head of a request, for its body, or
for the next request. One that waits for us (a long poll, an event stream) has none. Deadlines are
plain numbers that the server compares a few times a second: a timer for each request costs more.

Where the limit of connections is reached, the one that has waited longest for its client makes
room, taken from the address that holds the most. A newcomer is refused only where none waits.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Literal

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tenure.gateway.limits import LOG_QUOTA, RateLimit, origin_of
from tenure.gateway.problems import MEDIA, Problem
from tenure.gateway.settings import GatewaySettings
from tenure.gateway.sse import ABORT

_log = structlog.get_logger("tenure.gateway")

ADMIN = "tenure.admin"
"""In the scope of a request that came in by the admin address."""

_URL_BYTES_MAX = 8192
_HEADERS_MAX = 100
_PIPELINED_MAX = 100
# After a refusal, what a client is still sending is read for a moment: closing at once would reset
# the connection, and the client would lose the answer that says why. It is read at a slow pace, and
# of a few connections only: an attacker has more of it than we have time.
_DISCARD_S = 2.0
_DISCARD_BYTES = 8 << 20
_DISCARD_PAUSE_S = 0.02
_DISCARDING_MAX = 32
_STALL_S = 30.0  # how long a client may leave an answer unread
_GRACE_S = 2.0  # the application answers 408 itself before the connection is cut

Phase = Literal["head", "body", "done", "refused"]


class Connections:
    """All connections of one gateway."""

    def __init__(self, settings: GatewaySettings, connections_max: int) -> None:
        self.settings = settings
        self.admin_port = -1
        self._max = connections_max
        self._exempt = settings.proxy_networks
        self.discarding: set[Connection] = set()
        self.lines = RateLimit()
        self._by_address: dict[str, set[Connection]] = {}
        self._count = 0

    def enter(self, new: Connection) -> bool:
        """Take a connection in, if need be in place of one that waits for its client."""
        limit = self.settings.connections_per_address
        same = self._by_address.setdefault(new.address, set())
        has_room = len(same) < limit or self._is_exempt(new.address) or _closed_longest(same)
        if has_room and self._count >= self._max:
            has_room = _closed_longest(max(self._by_address.values(), key=len))
            has_room = has_room or _closed_longest(set(self._all()))
        if has_room:
            same.add(new)
            self._by_address[new.address] = same
            self._count += 1
        elif not same:
            del self._by_address[new.address]
        return has_room

    def leave(self, gone: Connection) -> None:
        """Forget a connection, if it was taken in."""
        self.discarding.discard(gone)
        same = self._by_address.get(gone.address, set())
        if gone in same:
            same.discard(gone)
            self._count -= 1
        if not same:
            self._by_address.pop(gone.address, None)

    def sweep(self) -> None:
        """End the connections whose client took too long."""
        now = asyncio.get_running_loop().time()
        for each in list(self._all()):
            if each.stalled_at < now - _STALL_S:
                each.transport.abort()
            elif each.deadline < now:
                each.expire()

    def _all(self) -> Iterator[Connection]:
        for same in self._by_address.values():
            yield from same

    def _is_exempt(self, address: str) -> bool:
        """Whether an address stands for many clients: a proxy that is trusted, or a unix socket."""
        if not address:
            return True
        host = ipaddress.ip_network(address)
        return any(host.version == net.version and host.overlaps(net) for net in self._exempt)


def _closed_longest(among: set[Connection]) -> bool:
    """Close the connection that has waited longest for its client; False if none waits."""
    waiting = [each for each in among if each.is_waiting]
    if not waiting:
        return False
    oldest = min(waiting, key=lambda each: each.since)
    oldest.leave()
    oldest.transport.abort()
    return True


class Connection(HttpToolsProtocol):
    """One connection. Head and body of an answer leave in one write: writes are what costs most.

    The application can abort it (`ABORT`): closing would wait for a client that does not read.
    """

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._connections = connections
        self._settings = connections.settings
        self._phase: Phase = "head"
        self._read = 0  # bytes that came at once
        self._bytes = 0  # those since the parser last made something of them
        self._refusal: Problem | None = None
        self._by_admin_address = False
        self.address = ""
        self.since = 0.0
        self.deadline = math.inf
        self.stalled_at = math.inf

    @property
    def is_waiting(self) -> bool:
        """Whether it is the client's turn, to write or to read."""
        return self._phase != "done" or not self._is_answering or self.flow.write_paused

    @property
    def _is_answering(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = origin_of(self.client[0]) if self.client else ""
        self._by_admin_address = (
            self.server is not None and self.server[1] == self._connections.admin_port
        )
        self._wait("head")
        if not self._connections.enter(self):
            self._write(Problem("too_many_connections", retry_after_s=1))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.leave()

    def leave(self) -> None:
        """Make room for another."""
        self._connections.leave(self)

    def data_received(self, data: bytes) -> None:
        before = self._phase
        self._read = len(data)
        self._bytes += self._read
        if before == "refused":
            self._read_slowly()
            return
        if before == "done":
            self._phase = "head"
        super().data_received(data)
        phase = self._phase
        if phase == "done":
            # An answer that went out before the end of its request left no timer behind.
            answered = self.cycle.response_complete
            self.deadline = self.loop.time() + self.timeout_keep_alive if answered else math.inf
        elif phase == "body" and self.cycle.response_complete:
            self._read_slowly()
        elif phase != "refused" and self._bytes > self._settings.head_bytes_max:
            self._refuse(Problem("head_too_large"))
        elif phase not in ("refused", before):
            self._wait(phase)

    def _read_slowly(self) -> None:
        if self._bytes > _DISCARD_BYTES:
            self.transport.abort()
        else:
            self.flow.pause_reading()
            self.loop.call_later(_DISCARD_PAUSE_S, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = "head"
        scope: Any = self.scope
        scope["extensions"] = {ABORT: self.transport.abort}
        if self._by_admin_address:
            scope[ADMIN] = True

    def on_headers_complete(self) -> None:
        # Most need no closer look. A head may be the second one in what was read.
        large = self._bytes > _URL_BYTES_MAX or self._read > _URL_BYTES_MAX
        if large or len(self.headers) > _HEADERS_MAX or self.pipeline:
            self._check_head()
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":
            joined: Any = Joined(self.transport, self._close)
            self.cycle.transport = joined
        self._phase = "body"
        self._bytes = 0

    def _check_head(self) -> None:
        """Raise what is wrong with a head; `send_400_response` then answers it."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.url) > _URL_BYTES_MAX:
            self._refusal = Problem("url_too_long")
        elif len(self.headers) > _HEADERS_MAX or size > self._settings.head_bytes_max:
            self._refusal = Problem("head_too_large")
        elif len(self.pipeline) >= _PIPELINED_MAX:
            self._refusal = Problem("bad_http", "too many requests wait on this connection")
        if self._refusal:
            raise self._refusal

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if not self.cycle.response_complete:
            self._bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._phase = "done"
        self._bytes = 0
        if self.cycle.response_complete:
            self._connections.discarding.discard(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.since = self.loop.time()
        if self.transport.is_closing():
            self.deadline = self.since + _STALL_S
        elif self._phase == "body" and self.cycle.response_complete:
            self._discard()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stalled_at = self.since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stalled_at = math.inf

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.deadline = self.loop.time() + _STALL_S

    def expire(self) -> None:
        """The deadline has passed."""
        if self._phase == "head" and self._is_answering:
            return  # bytes that came during an answer, such as an event stream, do not end it
        if self._phase == "body" and self._is_answering and self.flow.read_paused:
            return  # it is the application that does not take what came
        if self._phase == "head" and self._bytes and not self.transport.is_closing():
            self._refuse(Problem("head_timeout"))
        else:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What is not even HTTP gets a problem document as well."""
        self._note(msg)
        self._refuse(self._refusal or Problem("bad_http", msg))

    def _unsupported_upgrade_warning(self) -> None:
        self._note("Unsupported upgrade request.")

    def _note(self, reason: str) -> None:
        """Once a minute and address: strangers do not fill the log."""
        with suppress(Problem):
            self._connections.lines.take(self.address, LOG_QUOTA)
            _log.warning("bad_request", address=self.address, reason=reason)

    def _refuse(self, problem: Problem) -> None:
        """Answer and close, unless another answer is on its way: then only close."""
        if self._is_answering:
            self.transport.abort()
        elif not self.transport.is_closing():
            self._write(problem)
            self._end()

    def _write(self, problem: Problem) -> None:
        body = problem.body("", "")
        headers = [*problem.headers, ("content-type", MEDIA.decode()), ("connection", "close")]
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        title = HTTPStatus(problem.status).phrase
        head = f"HTTP/1.1 {problem.status} {title}\r\n{lines}content-length: {len(body)}"
        self.transport.write(head.encode() + b"\r\n\r\n" + body)

    def _close(self) -> None:
        """Close after an answer; a request that is still coming is read for a moment."""
        if self._phase == "body":
            self._end()
        else:
            self.transport.close()

    def _end(self) -> None:
        """Say no more, and read for a moment."""
        self._phase = "refused"
        self.pipeline.clear()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._discard()

    def _discard(self) -> None:
        """Begin to throw away what comes."""
        cycle: Any = self.cycle
        if cycle is not None:
            cycle.body.clear()
        self._bytes = 0
        self.since = self.loop.time()
        self.deadline = self.since + _DISCARD_S
        self._connections.discarding.add(self)
        if len(self._connections.discarding) > _DISCARDING_MAX:
            self.transport.close()

    def _wait(self, phase: Phase) -> None:
        settings = self._settings
        allowed_ms = settings.head_timeout_ms if phase == "head" else settings.body_timeout_ms
        self.since = self.loop.time()
        self.deadline = self.since + allowed_ms / 1000 + (_GRACE_S if phase == "body" else 0)


class Joined:
    """A transport on which the head of an answer whose body has a length waits for that body."""

    __slots__ = ("_close", "_head", "_transport")

    def __init__(self, transport: asyncio.Transport, close: Any) -> None:
        self._transport = transport
        self._close = close
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and b"\r\ncontent-length: " in data:
            self._head = data
            return
        if not self._transport.is_closing():  # a pipelined answer may come after its client left
            self._transport.write(data)

    def close(self) -> None:
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
        self._head = b""
        self._close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()
