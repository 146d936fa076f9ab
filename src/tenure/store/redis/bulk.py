"""The blocking Redis client, for processes without an event loop."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import hiredis

from tenure.core.errors import ReplyLost, StoreError, StoreUnreachable
from tenure.store.redis.address import Arg, RedisAddress, parse_address
from tenure.store.redis.cluster import redirect_of, slot_of, slot_ranges
from tenure.store.redis.connection import check_greeting
from tenure.store.redis.sentinel import primary_in, primary_query
from tenure.store.redis.wire import (
    MORE,
    UNREADABLE,
    check_reply,
    command_name,
    encode,
    reply_reader,
)

_RECEIVE_BYTES = 1 << 18
_ASK_WITHIN_S = 2.0


class BulkRedis:
    """A blocking client for reading long streams in a process without an event loop.

    It requests the next page before it returns the last one, so that the server works while the
    caller does. For one thread. On a cluster it speaks to the owner of `key`.
    """

    def __init__(
        self,
        url: str | RedisAddress,
        *,
        key: str = "",
        name: str = "tenure-bulk",
        timeout_s: float = 60.0,
    ) -> None:
        address = parse_address(url) if isinstance(url, str) else url
        self._is_located = address.topology != "single"
        if self._is_located:
            address = locate(address, key)
        self._label = address.label
        self._reader = reply_reader()
        try:
            if address.path:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(timeout_s)
                self._socket.connect(address.path)
            else:
                plain = socket.create_connection((address.host, address.port), timeout=timeout_s)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                context = address.tls_context()
                self._socket = (
                    context.wrap_socket(plain, server_hostname=address.host) if context else plain
                )
        except OSError as error:
            raise StoreUnreachable(f"{self._label}: cannot connect: {error}") from error
        try:
            for command in address.greeting(name, address.login()):
                self._send(encode(command))
                check_greeting(self._label, str(command[0]), self._reply())
        except StoreError:
            self.close()
            raise

    def __enter__(self) -> BulkRedis:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, *args: Arg) -> Any:
        """Send one command; an error reply is raised."""
        self._send(encode(args))
        return check_reply(self._reply(), command_name(args))

    def pages(self, key: str, after: str, upto: str, size: int) -> Iterator[list[Any]]:
        """The entries of a stream in (`after`, `upto`], a page at a time."""

        def request(start: str) -> None:
            self._send(encode(("XRANGE", key, start, upto, "COUNT", size)))

        request(f"({after}" if after else "-")
        while page := check_reply(self._reply(), "XRANGE"):
            is_last = len(page) < size
            if not is_last:
                request(f"({page[-1][0].decode()}")
            yield page
            if is_last:
                return

    def send_all(self, packed: list[bytes]) -> list[Any]:
        """Send encoded commands in one write; returns the replies, or raises the first error."""
        self._send(b"".join(packed))
        return [check_reply(self._reply(), "pipeline") for _ in packed]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _send(self, packed: bytes) -> None:
        try:
            self._socket.sendall(packed)
        except OSError as error:
            # Some commands may have been sent, and the server may have executed them.
            raise ReplyLost(f"{self._label}: the connection broke: {error}") from error

    def _reply(self) -> Any:
        """The next reply; an error reply is a value."""
        try:
            reply = self._reader.gets()
            while reply is MORE:
                data = self._socket.recv(_RECEIVE_BYTES)
                if not data:
                    raise ReplyLost(f"{self._label}: the server closed the connection")
                self._reader.feed(data)
                reply = self._reader.gets()
        except (OSError, hiredis.ProtocolError) as error:
            raise ReplyLost(f"{self._label}: no answer came: {error}") from error
        if self._is_located and redirect_of(reply):
            text = f"{self._label}: the slot is moving to another node ({reply.reply}); read again"
            return StoreUnreachable(text, reply=reply.reply)
        return reply


def locate(address: RedisAddress, key: str) -> RedisAddress:
    """The primary that Sentinels name, or the node of a cluster that owns the key."""
    refusals = []
    for asked in address.servers():
        try:
            with BulkRedis(asked, timeout_s=_ASK_WITHIN_S) as client:
                if address.topology == "cluster":
                    ranges = slot_ranges(client.call("CLUSTER", "SLOTS"), asked.host)
                    slot = slot_of(key)
                    place = next((at for start, end, at in ranges if start <= slot <= end), None)
                else:
                    reply = client.call(*primary_query(address.service))
                    place = primary_in(reply) if reply else None
        except StoreError as error:
            refusals.append(str(error))
            continue
        except UNREADABLE:
            refusals.append(f"{asked.label}: its answer cannot be read")
            continue
        if place is not None:
            return address.node(*place)
        refusals.append(f"{asked.label}: it knows no primary")
    raise StoreUnreachable(f"{address.label}: {'; '.join(refusals)}")
