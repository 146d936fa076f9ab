"""The Redis client: one pipelined connection that reconnects and never resends by itself.

redis-py spends most of a worker's time in Python between the socket and the caller; this client
puts a hiredis parser straight behind the transport. Concurrent callers share one connection and,
within one turn of the event loop, one write.

Three things can go wrong, and the caller can tell them apart: the server answered with an error
(ServerError), the command never left (StoreUnreachable: send it again if you like), or it left and
no answer came (ReplyLost: it may have been executed). The next call after a loss reconnects.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

from tenure.core.errors import ReplyLost, ServerError, StoreError, StoreUnreachable, UsageError
from tenure.store.redis_connection import (
    MORE,
    Arg,
    Connection,
    Dialer,
    command_name,
    encode,
    is_no_script,
    is_wrong_type,
    parse_address,
    reply_reader,
)
from tenure.store.scripts import Script

__all__ = ["Arg", "BulkRedis", "Redis"]

_CLOSE_PATIENCE_S = 1.0


class Redis:
    """A client for one event loop. Replies are raw: bytes, int, list, None.

    Commands that change the connection itself or answer more than once (SUBSCRIBE, MONITOR, SELECT,
    CLIENT REPLY) do not belong here; blocking commands belong into `block`.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "tenure",
        timeout_ms: int = 10_000,
        connect_timeout_ms: int = 5_000,
    ) -> None:
        self._address = parse_address(url)
        self._timeout_ms = timeout_ms
        self._dialer = Dialer(
            self._address,
            name=name,
            patience_ms=timeout_ms,
            connect_timeout_ms=connect_timeout_ms,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: Connection | None = None
        self._blocking: set[Connection] = set()
        self._idle: list[Connection] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"Redis({self._address.label!r})"

    @property
    def label(self) -> str:
        """The server's address without credentials, for messages and logs."""
        return self._address.label

    async def call(self, *args: Arg) -> Any:
        """One command and its reply; calls made at the same time travel together."""
        packed = encode(args)
        connection = self._main
        if connection is None or connection.lost or self._loop is not asyncio.get_running_loop():
            connection = await self._ready()
        try:
            return await connection.send(packed)
        except ServerError as error:
            error.operation = error.operation or command_name(args)
            if is_wrong_type(error) and args[0] not in ("EVALSHA", "EVAL"):
                await self._name_keys(error, args[1:2])
            raise

    async def pipeline(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Many commands in one write; a ServerError stands as a value in its command's place."""
        packed = [encode(command) for command in commands]
        if not packed:
            return []
        connection = await self._ready()
        replies: list[Any] = await connection.send_many(packed)
        if all(isinstance(reply, StoreUnreachable) for reply in replies):
            raise replies[0]  # the server is loading: it executed none of them
        return replies

    async def run(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Arg]) -> Any:
        """Runs a script by its hash, by its source where the server does not hold it yet."""
        _check_keys(script, keys)
        try:
            try:
                return await self.call("EVALSHA", script.sha, script.keys, *keys, *args)
            except ServerError as error:
                if not is_no_script(error):
                    raise
            return await self.call("EVAL", script.source, script.keys, *keys, *args)
        except ServerError as error:
            error.operation = script.name
            if is_wrong_type(error):
                await self._name_keys(error, keys)
            raise

    async def _name_keys(self, error: ServerError, keys: Sequence[Arg]) -> None:
        """Add to a WRONGTYPE which keys it may mean and what is there, which Redis does not tell.

        A script may have met one that it found by itself; then these have the types they should.
        """
        try:
            types = await self.pipeline([("TYPE", key) for key in keys])
        except StoreError:
            return
        there = [
            f"{_shown(key)} is a {word.decode()}"
            for key, word in zip(keys, types, strict=True)
            if isinstance(word, bytes) and word != b"none"
        ]
        error.named = f"a key holds a value of the wrong type: {', '.join(there)}"
        error.args = (f"{error.args[0]}: {', '.join(there)}",)

    async def load(self, scripts: Iterable[Script]) -> None:
        """Hands scripts to the server before they are needed.

        `run` does without it, so a server that refuses, because this user may not, is no error.
        """
        await self.pipeline([("SCRIPT", "LOAD", each.source) for each in scripts])

    async def block(self, *args: Arg, wait_ms: int) -> Any:
        """A blocking command on a connection of its own; None when the server's wait ran out.

        `wait_ms` repeats, for our own timer, the time that the command itself tells the server.
        Cancelling the caller drops the connection: a late reply is never handed to anybody else.
        """
        (reply,) = await self._blocked([encode(args)], wait_ms)
        return _checked(reply, command_name(args))

    async def block_then_run(
        self,
        blocking: Sequence[Arg],
        script: Script,
        keys: Sequence[str | bytes],
        args: Sequence[Arg],
        *,
        wait_ms: int,
    ) -> Any:
        """A script that the server runs in the moment in which a blocking command ends.

        Both leave in one write. A server does not look at what follows a command that blocks, and
        goes on with it as soon as that is over: one round trip where `block` and `run` take two.
        Returns the script's reply; it ran even if the blocking command is what failed.
        """
        _check_keys(script, keys)
        by_sha = encode(("EVALSHA", script.sha, script.keys, *keys, *args))
        waited, reply = await self._blocked([encode(blocking), by_sha], wait_ms)
        _checked(waited, command_name(blocking))
        if isinstance(reply, ServerError) and is_no_script(reply):
            return await self.run(script, keys, args)
        return _checked(reply, script.name)

    async def _blocked(self, packed: Sequence[bytes], wait_ms: int) -> list[Any]:
        """The replies to commands, of which the first blocks; errors stand as values."""
        connection = await self._lend()
        connection.patience_ms = wait_ms + self._timeout_ms
        try:
            replies = await connection.send_many(packed)
        except BaseException:
            connection.drop("the caller of a blocking command went away")
            self._blocking.discard(connection)
            raise
        self._idle.append(connection)
        return replies

    async def server_time_ms(self) -> int:
        """The server's clock."""
        seconds, micros = await self.call("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def close(self) -> None:
        """Ends all connections; calls still waiting fail. A closed client stays closed."""
        self._closed = True
        await self._dialer.cancel()
        connections = [*self._blocking, *([self._main] if self._main else [])]
        self._main = None
        self._blocking.clear()
        self._idle.clear()
        for connection in connections:
            connection.drop("the client was closed")
        if connections:
            await asyncio.wait([c.closed for c in connections], timeout=_CLOSE_PATIENCE_S)

    async def _ready(self) -> Connection:
        self._check_usable()
        if self._main is None or self._main.lost:
            if self._main is not None and self._main.left:
                self._main.left = ""
                self._dialer.hold_off()
            self._main = await self._dialer.shared()
        return self._main

    async def _lend(self) -> Connection:
        """A connection for one blocking command: an idle one, or a new one."""
        self._check_usable()
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost:
                return connection
            self._blocking.discard(connection)
            if connection.left:
                self._dialer.hold_off()
        connection = await self._dialer.dial()
        if self._closed:
            connection.drop("the client was closed")
            self._check_usable()
        self._blocking.add(connection)
        return connection

    def _check_usable(self) -> None:
        if self._closed:
            raise UsageError(f"{self!r} was closed; open a new client")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise UsageError(
                f"{self!r} belongs to another event loop; each loop (or thread) opens its own"
            )


def _shown(key: Arg) -> str:
    return key.decode(errors="replace") if isinstance(key, bytes) else str(key)


def _check_keys(script: Script, keys: Sequence[str | bytes]) -> None:
    if len(keys) != script.keys:
        raise UsageError(
            f"script {script.name} takes {script.keys} keys, {len(keys)} were given",
            operation=script.name,
        )


def _checked(reply: Any, operation: str) -> Any:
    """The reply, or the error that stands in its place."""
    if isinstance(reply, ServerError):
        reply.operation = reply.operation or operation
    if isinstance(reply, StoreError):
        raise reply
    return reply


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
