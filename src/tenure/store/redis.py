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
from collections.abc import Iterable, Sequence
from typing import Any

from tenure.core.errors import ServerError, StoreError, StoreUnreachable, UsageError
from tenure.store.address import parse_address
from tenure.store.connection import Connection
from tenure.store.dial import Dialer
from tenure.store.scripts import Script
from tenure.store.wire import Arg, command_name, encode, is_no_script, is_wrong_type

__all__ = ["Arg", "Redis"]

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
