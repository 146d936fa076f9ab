"""Client connections: uvicorn's protocol with limits on bytes, time and number of connections.

A connection that waits for its client has a deadline: for the request head, for the body, or for
the next request. A connection that waits for us (a long poll, an event stream) has none. Deadlines
are plain numbers that the server compares several times a second: a timer per request costs more.

At the limit of connections, the connection that has waited longest for its client is closed. It is
taken from the address with the most connections. A new client is refused only if none waits.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from itertools import islice
from typing import Any, Literal

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tenure.gateway.limits import LOG_QUOTA, RateLimit, origin_of
from tenure.gateway.problems import MEDIA, Problem
from tenure.gateway.settings import GatewaySettings
from tenure.gateway.sse import ABORT

_log = structlog.get_logger("tenure.gateway")

ADMIN = "tenure.admin"
"""Set in the scope of a request that arrived at the admin address."""

_URL_BYTES_MAX = 8192
_HEADERS_MAX = 100
_PIPELINED_MAX = 100
# After a refusal we read on for a moment. Closing at once would reset the connection, and the
# client would lose the response that says why. We read slowly and from few connections, so that
# attackers cannot keep us busy with it.
_DISCARD_S = 2.0
_DISCARD_BYTES = 8 << 20
_DISCARD_PAUSE_S = 0.02
_DISCARDING_MAX = 32
_SWEEP_MAX = 1_000
_STALL_S = 30.0  # how long a client may leave a response unread
_GRACE_S = 2.0  # so that the application can answer 408 before the connection is closed

Phase = Literal["head", "body", "done", "refused"]


class Connections:
    """All connections of one gateway."""

    def __init__(self, settings: GatewaySettings, connections_max: int) -> None:
        self.settings = settings
        self.admin_port = -1
        self._max = connections_max
        self._exempt = settings.proxy_networks
        self.discarding: set[ClientConnection] = set()
        self.log_limit = RateLimit()
        self._by_address: dict[str, set[ClientConnection]] = {}
        self._count = 0
        self._sweeping: Iterator[ClientConnection] = iter(())

    def enter(self, new: ClientConnection) -> bool:
        """Add a connection, if necessary in place of one that waits for its client.

        False if there is no room.
        """
        limit = self.settings.connections_per_address
        same = self._by_address.setdefault(new.address, set())
        has_room = len(same) < limit or self._is_exempt(new.address) or _close_one_waiting(same)
        if has_room and self._count >= self._max:
            has_room = _close_one_waiting(max(self._by_address.values(), key=len))
            has_room = has_room or _close_one_waiting(set(self._all()))
        if has_room:
            same.add(new)
            self._by_address[new.address] = same
            self._count += 1
        elif not same:
            del self._by_address[new.address]
        return has_room

    def leave(self, gone: ClientConnection) -> None:
        """Forget a connection, if it was added."""
        self.discarding.discard(gone)
        same = self._by_address.get(gone.address, set())
        if gone in same:
            same.discard(gone)
            self._count -= 1
        if not same:
            self._by_address.pop(gone.address, None)

    def sweep(self) -> None:
        """Close connections whose deadline has passed; each call checks the next thousand.

        Ten thousand at once would delay the events of all streams by milliseconds.
        """
        now = asyncio.get_running_loop().time()
        batch = list(islice(self._sweeping, _SWEEP_MAX))
        if not batch:
            self._sweeping = iter(list(self._all()))
            batch = list(islice(self._sweeping, _SWEEP_MAX))
        for each in batch:
            if each.stalled_at < now - _STALL_S:
                each.transport.abort()
            elif each.deadline < now:
                each.expire()

    def _all(self) -> Iterator[ClientConnection]:
        for same in self._by_address.values():
            yield from same

    def _is_exempt(self, address: str) -> bool:
        """Whether an address stands for many clients: a trusted proxy, or a unix socket."""
        if not address:
            return True
        host = ipaddress.ip_network(address)
        return any(host.version == net.version and host.overlaps(net) for net in self._exempt)


def _close_one_waiting(connections: set[ClientConnection]) -> bool:
    """Close the connection that has waited longest for its client; False if none waits."""
    waiting = [each for each in connections if each.is_waiting]
    if not waiting:
        return False
    oldest = min(waiting, key=lambda each: each.waiting_since)
    oldest.leave()
    oldest.transport.abort()
    return True


class ClientConnection(HttpToolsProtocol):
    """One connection. Head and body of a response are sent in one write: writes cost most.

    The application can abort it (`ABORT`), because closing waits for a client that does not read.
    """

    # Without slots, an instance has so many attributes that its dictionary takes a kilobyte more.
    __slots__ = (
        "_by_admin_address",
        "_bytes",
        "_coalescing",
        "_connections",
        "_phase",
        "_read",
        "_refusal",
        "_settings",
        "address",
        "deadline",
        "stalled_at",
        "waiting_since",
    )

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._connections = connections
        self._settings = connections.settings
        self._phase: Phase = "head"
        self._read = 0  # bytes of the last read
        self._bytes = 0  # bytes since the parser last completed a head or a part of a body
        self._refusal: Problem | None = None
        self._by_admin_address = False
        self._coalescing: Any = None
        self.address = ""
        self.waiting_since = 0.0
        self.deadline = math.inf
        self.stalled_at = math.inf

    @property
    def is_waiting(self) -> bool:
        """Whether we wait for the client to send or to read."""
        return self._phase != "done" or not self._is_answering or self.flow.write_paused

    @property
    def _is_answering(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._coalescing = CoalescingTransport(transport, self._close)
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
        """Give up the place of this connection."""
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
            # A request may be refused before it has ended.
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
        # Only large heads are checked. With pipelining, this may be the second head of one read.
        large = self._bytes > _URL_BYTES_MAX or self._read > _URL_BYTES_MAX
        if large or len(self.headers) > _HEADERS_MAX or self.pipeline:
            self._check_head()
        super().on_headers_complete()
        # uvicorn adds trailers to this list. The application keeps the list of the head: a proxy
        # has checked headers, and trailers pass by it.
        self.headers = []
        if self.scope["method"] != "HEAD":
            self.cycle.transport = self._coalescing
        self._phase = "body"
        self._bytes = 0

    def _check_head(self) -> None:
        """Raise the problem of a request head; `send_400_response` then sends it."""
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
        """Like uvicorn's, but with a deadline in place of its timer for the next request."""
        self.server_state.total_requests += 1
        self.waiting_since = self.loop.time()
        if self.transport.is_closing():
            self.deadline = self.waiting_since + _STALL_S
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._phase == "done":
            self.deadline = self.waiting_since + self.timeout_keep_alive
        elif self._phase == "body" and self.cycle.response_complete:
            self._discard()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stalled_at = self.waiting_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stalled_at = math.inf

    def expire(self) -> None:
        """The deadline has passed."""
        if self._phase == "head" and self._is_answering:
            return  # bytes that arrive during a response, such as an event stream, do not end it
        if self._phase == "body" and self._is_answering and self.flow.read_paused:
            return  # the application has not read what arrived
        if self._phase == "head" and self._bytes and not self.transport.is_closing():
            self._refuse(Problem("head_timeout"))
        elif self._phase == "done" and not self.transport.is_closing():
            self.transport.close()  # sends the rest of the last response
            self.deadline = self.loop.time() + _STALL_S
        else:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP with a problem document too."""
        self._log_bad_request(msg)
        self._refuse(self._refusal or Problem("bad_http", msg))

    def _unsupported_upgrade_warning(self) -> None:
        self._log_bad_request("Unsupported upgrade request.")

    def _log_bad_request(self, reason: str) -> None:
        """Log at most once a minute per address, so that strangers cannot fill the log."""
        with suppress(Problem):
            self._connections.log_limit.take(self.address, LOG_QUOTA)
            _log.warning("bad_request", address=self.address, reason=reason)

    def _refuse(self, problem: Problem) -> None:
        """Send a problem and close. If another response has begun, only close."""
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
        """Close after a response. If the request is still arriving, read on for a moment."""
        if self._phase == "body":
            self._end()
        else:
            self.transport.close()

    def _end(self) -> None:
        """Send no more, and read on for a moment."""
        self._phase = "refused"
        self.pipeline.clear()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._discard()

    def _discard(self) -> None:
        """Discard what arrives from now on."""
        cycle: Any = self.cycle
        if cycle is not None:
            cycle.body = bytearray()
        self._bytes = 0
        self.waiting_since = self.loop.time()
        self.deadline = self.waiting_since + _DISCARD_S
        self._connections.discarding.add(self)
        if len(self._connections.discarding) > _DISCARDING_MAX:
            self.transport.close()

    def _wait(self, phase: Phase) -> None:
        settings = self._settings
        allowed_ms = settings.head_timeout_ms if phase == "head" else settings.body_timeout_ms
        self.waiting_since = self.loop.time()
        self.deadline = (
            self.waiting_since + allowed_ms / 1000 + (_GRACE_S if phase == "body" else 0)
        )


class CoalescingTransport:
    """Holds back the head of a response with a content-length, and sends it with the body."""

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
        if not self._transport.is_closing():  # the client of a pipelined request may have left
            self._transport.write(data)

    def close(self) -> None:
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
        self._head = b""
        self._close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()
