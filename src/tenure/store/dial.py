"""Opening connections: one attempt shared by all who wait, and patience with a server that is away.

The first attempt after a loss is immediate. Each failure doubles a short pause, with jitter, before
the next attempt, so that a dead server is not hammered and a herd does not arrive at once. A server
that was left because it is not ready or no primary counts as a failure too.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tenure.core.errors import ServerError, StoreError, StoreUnreachable
from tenure.store.address import RedisAddress
from tenure.store.connection import Connection
from tenure.store.wire import Arg, encode

_PAUSE_MS_FIRST = 50
_PAUSE_MS_MAX = 1_000
# After so long without a failure the next one counts as the first.
_CALM_S = 3.0


class Dialer:
    """Opens connections to one address, all with the same name and patience."""

    def __init__(
        self, address: RedisAddress, *, name: str, patience_ms: int, connect_timeout_ms: int
    ) -> None:
        self._address = address
        self._name = "".join(c if "!" <= c <= "~" else "-" for c in name) or "tenure"
        self._patience_ms = patience_ms
        self._connect_timeout_ms = connect_timeout_ms
        self._failures = 0
        self._not_before_s = float("-inf")
        self._shared: asyncio.Task[Connection] | None = None

    async def shared(self) -> Connection:
        """A new connection; callers that come while one is being opened get that same one."""
        if self._shared is None:
            self._shared = asyncio.create_task(self.dial())
            self._shared.add_done_callback(self._shared_is_done)
        attempt = self._shared
        try:
            # Shielded: one caller that gives up does not take the attempt away from the others.
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if attempt.cancelled() and not (caller and caller.cancelling()):
                raise StoreUnreachable(f"{self._address.label}: the client was closed") from None
            raise

    async def dial(self) -> Connection:
        """A new connection of the caller's own."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._not_before_s - loop.time()))
        try:
            connection = await self._attempt()
        except StoreError:
            self.hold_off()
            raise
        return connection

    def hold_off(self) -> None:
        """The last connection was of no use: wait before the next one, and longer each time."""
        now = asyncio.get_running_loop().time()
        if now - self._not_before_s > _CALM_S:
            self._failures = 0
        pause_ms = min(_PAUSE_MS_MAX, _PAUSE_MS_FIRST << min(self._failures, 10))
        self._failures += 1
        self._not_before_s = now + pause_ms * random.uniform(0.5, 1.0) / 1000

    async def cancel(self) -> None:
        """Gives up an attempt that is under way; whoever waits for it gets StoreUnreachable."""
        task = self._shared
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def _shared_is_done(self, task: asyncio.Task[Connection]) -> None:
        self._shared = None
        if not task.cancelled():
            task.exception()  # seen, even if every caller has gone away

    async def _attempt(self) -> Connection:
        label = self._address.label
        connection = Connection(label, self._patience_ms)
        try:
            async with asyncio.timeout(self._connect_timeout_ms / 1000):
                await self._reach(connection)
                await _introduce(connection, self._address, self._name)
        except TimeoutError:
            connection.drop("too slow to connect")
            raise StoreUnreachable(
                f"{label}: no connection within {self._connect_timeout_ms} ms"
            ) from None
        except OSError as error:
            connection.drop("could not connect")
            raise StoreUnreachable(f"{label}: cannot connect: {error}") from error
        except BaseException:
            connection.drop("gave up connecting")
            raise
        return connection

    async def _reach(self, connection: Connection) -> None:
        loop, address = asyncio.get_running_loop(), self._address
        if address.path:
            await loop.create_unix_connection(lambda: connection, address.path)
            return
        await loop.create_connection(
            lambda: connection, address.host, address.port, ssl=address.tls_context()
        )


async def _introduce(connection: Connection, address: RedisAddress, name: str) -> None:
    """AUTH, SELECT and CLIENT SETNAME in one write; the first refusal that matters is raised."""
    commands: list[tuple[Arg, ...]] = []
    if address.password or address.user:
        user = (address.user,) if address.user else ()
        commands.append(("AUTH", *user, address.password))
    if address.db:
        commands.append(("SELECT", address.db))
    commands.append(("CLIENT", "SETNAME", name))
    try:
        replies = await connection.send_many([encode(command) for command in commands])
    except StoreError as error:
        # Nothing that matters was sent yet, so for the caller this is "could not connect".
        raise StoreUnreachable(f"{error}".partition(";")[0]) from None
    for command, reply in zip(commands, replies, strict=True):
        _check(address.label, str(command[0]), reply)


def _check(label: str, command: str, reply: Any) -> None:
    if isinstance(reply, StoreUnreachable):
        raise StoreUnreachable(f"{label}: {reply}", operation=command, reply=reply.reply)
    if not isinstance(reply, ServerError):
        return
    text = str(reply.reply)
    if command == "AUTH":
        # An old server quotes the arguments of a command that it refuses: keep the first word.
        word = text.partition(" ")[0]
        raise ServerError(
            f"{label}: the server refused the user and password of the URL ({word})",
            operation=command,
            reply=word,
        )
    # A name is a courtesy: a user that may not set one is no reason to stop.
    if command == "SELECT" or text.startswith("NOAUTH"):
        raise ServerError(f"{label}: {reply}", operation=command, reply=text)
