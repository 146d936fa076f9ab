"""A Redis connection for bulk readers: blocking, bare, and busy with the next page meanwhile.

The pipeline reads journals of many millions of entries in processes that have no event loop. Here
the socket is read straight into the parser, and the next page is asked for before the last one is
handed out, so that the server works while the reader converts.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from tenure.core.errors import ReplyLost, StoreError, StoreUnreachable
from tenure.store.address import parse_address
from tenure.store.wire import MORE, Arg, encode, reply_reader

_PIECE = 1 << 18


class BulkRedis:
    """One blocking connection; use it in one thread. Replies are raw, as those of `Redis`."""

    def __init__(self, url: str, *, name: str = "tenure-bulk", timeout_s: float = 60.0) -> None:
        address = parse_address(url)
        self._label = address.label
        self._reader = reply_reader()
        try:
            if address.path:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(timeout_s)
                self._socket.connect(address.path)
            else:
                plain = socket.create_connection((address.host, address.port), timeout=timeout_s)
                context = address.tls_context()
                self._socket = (
                    context.wrap_socket(plain, server_hostname=address.host) if context else plain
                )
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise StoreUnreachable(f"{self._label}: cannot connect: {error}") from error
        if address.password or address.user:
            user = (address.user,) if address.user else ()
            self.call("AUTH", *user, address.password)
        if address.db:
            self.call("SELECT", address.db)
        self.call("CLIENT", "SETNAME", name)

    def __enter__(self) -> BulkRedis:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def call(self, *args: Arg) -> Any:
        """One command and its reply; an error reply is raised."""
        self._send(encode(args))
        return self._reply()

    def pages(self, key: str, after: str, upto: str, size: int) -> Iterator[list[Any]]:
        """The entries of a stream in (`after`, `upto`], a page at a time."""
        start = f"({after}" if after else "-"
        self._send(encode(("XRANGE", key, start, upto, "COUNT", size)))
        while True:
            page = self._reply()
            if not page:
                return
            is_last = len(page) < size
            if not is_last:
                start = f"({page[-1][0].decode()}"
                self._send(encode(("XRANGE", key, start, upto, "COUNT", size)))
            yield page
            if is_last:
                return

    def send_all(self, packed: list[bytes]) -> list[Any]:
        """Encoded commands in one write; their replies, of which the first error is raised."""
        self._send(b"".join(packed))
        return [self._reply() for _ in packed]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _send(self, packed: bytes) -> None:
        try:
            self._socket.sendall(packed)
        except OSError as error:
            # Part of it may have left, and what arrived may have been executed.
            raise ReplyLost(f"{self._label}: the connection broke: {error}") from error

    def _reply(self) -> Any:
        reader = self._reader
        reply = reader.gets()
        while reply is MORE:
            try:
                piece = self._socket.recv(_PIECE)
            except OSError as error:
                raise ReplyLost(f"{self._label}: no answer came: {error}") from error
            if not piece:
                raise ReplyLost(f"{self._label}: the server closed the connection")
            reader.feed(piece)
            reply = reader.gets()
        if isinstance(reply, StoreError):
            raise reply
        return reply
