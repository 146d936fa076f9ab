"""Connections to a PostgreSQL database, shared by all of one event loop that ask for the same ones.

They are opened when needed, up to a limit, and closed when nothing used them for a while. The one
that listens for notices is one of them: notices arrive on it between the statements of others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from typing import TypeAlias

import asyncpg

from tenure.core.errors import ServerError, UsageError

IDLE_S = 30.0

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
Heard: TypeAlias = Callable[[str], None]
"""Takes what a notice says."""


class Pool:
    """The connections of one event loop with the same settings to the same database."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]], connections_max: int) -> None:
        self._connect = connect
        self._slots = asyncio.Semaphore(connections_max)
        self._idle: list[tuple[Connection, float]] = []
        self._loop = asyncio.get_running_loop()
        self._sweep: asyncio.TimerHandle | None = None
        self._listening: Connection | None = None
        self._heard: dict[Heard, None] = {}
        self._begins = asyncio.Lock()
        self._closed = False
        self.key: Hashable = None
        self.users = 0

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection of one's own for a moment; one that broke is not used again."""
        async with self._slots:
            connection = await self._take()
            healthy = False
            try:
                yield connection
                healthy = True
            except (ServerError, UsageError):
                healthy = True
                raise
            finally:
                if healthy and not self._closed and not connection.is_closed():
                    self._idle.append((connection, self._loop.time()))
                    if self._sweep is None:
                        self._sweep = self._loop.call_later(IDLE_S, self._close_idle)
                else:
                    connection.terminate()

    async def listen(self, channel: str, heard: Heard) -> bool:
        """Call `heard` for every notice; True when one may have been missed until now."""
        async with self._begins:
            known, listening = heard in self._heard, self._listening
            self._heard[heard] = None
            if listening is not None and not listening.is_closed():
                return not known
            async with self.connection() as connection:
                await connection.add_listener(channel, self._hear)
                self._listening = connection
            return True

    def ignore(self, heard: Heard) -> None:
        """No longer call `heard`."""
        self._heard.pop(heard, None)

    async def close(self) -> None:
        """Close every connection."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        idle, self._idle = self._idle, []
        for connection, _ in idle:
            with contextlib.suppress(Exception):
                await connection.close(timeout=1)

    async def _take(self) -> Connection:
        while self._idle:
            connection, _ = self._idle.pop()
            if not connection.is_closed():
                return connection
        return await self._connect()

    def _close_idle(self) -> None:
        """Close those that nothing used for a while, except the one that listens."""
        self._sweep, now = None, self._loop.time()
        kept: list[tuple[Connection, float]] = []
        for connection, used in self._idle:
            if now - used < IDLE_S or (connection is self._listening and self._heard):
                kept.append((connection, used))
            else:
                connection.terminate()
        self._idle = kept
        if kept:
            self._sweep = self._loop.call_later(IDLE_S, self._close_idle)

    def _hear(self, _connection: object, _pid: int, _channel: str, says: object) -> None:
        for heard in list(self._heard):
            heard(str(says))


_pools: dict[Hashable, Pool] = {}


def join(key: Hashable, make: Callable[[], Pool]) -> Pool:
    """The pool of this event loop for a key, made for its first user."""
    whole = (asyncio.get_running_loop(), key)
    pool = _pools.get(whole)
    if pool is None:
        pool = _pools[whole] = make()
        pool.key = whole
    pool.users += 1
    return pool


async def leave(pool: Pool) -> None:
    """One user fewer; the last one closes the connections."""
    pool.users -= 1
    if pool.users == 0:
        _pools.pop(pool.key, None)  # no search: other threads join and leave meanwhile
        await pool.close()
