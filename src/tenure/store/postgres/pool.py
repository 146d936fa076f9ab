"""The connections of one event loop with the same settings to the same database."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from typing import TypeAlias

from tenure.core.errors import ServerError, UsageError
from tenure.store.postgres.session import Connection

Callback: TypeAlias = Callable[[str], None]
"""Receives the payload of a notification."""

IDLE_S = 30.0


class Pool:
    """The connections of one event loop with the same settings to the same database.

    They are opened when needed, up to a limit, and closed when idle for a while. asyncpg's own pool
    resets a connection after each use, which is a second round trip, and needs another connection
    for LISTEN. Here notifications arrive on a pooled connection, between other statements.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        connections_max: int,
        idle_s: float = IDLE_S,
    ) -> None:
        self._connect = connect
        self._idle_s = idle_s
        self._shares_sessions = False
        self._slots = asyncio.Semaphore(connections_max)
        self._idle: list[tuple[Connection, float]] = []
        self._loop = asyncio.get_running_loop()
        self._sweep: asyncio.TimerHandle | None = None
        self._listeners: dict[str, Connection] = {}
        self._callbacks: dict[Callback, set[str]] = {}
        self._listen_lock = asyncio.Lock()
        self._closed = False
        self.key: Hashable = None
        self.users = 0

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for the caller alone; a broken one is not used again."""
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
                        self._sweep = self._loop.call_later(self._idle_s, self._close_idle)
                else:
                    connection.terminate()

    async def listen(self, channel: str, callback: Callback) -> bool | None:
        """Call `callback` for every notification of a channel; True if one may have been missed
        before, None if there are none, because a pooler shares the sessions."""
        if self._shares_sessions:
            return None
        async with self._listen_lock:
            channels = self._callbacks.setdefault(callback, set())
            is_known, listener = channel in channels, self._listeners.get(channel)
            channels.add(channel)
            if listener is not None and not listener.is_closed():
                return not is_known
            async with self.connection() as connection:
                if connection.begin:
                    self._shares_sessions = True
                    return None
                await connection.add_listener(channel, self._notify)
                self._listeners[channel] = connection
            return True

    def ignore(self, callback: Callback) -> None:
        """No longer call `callback`."""
        self._callbacks.pop(callback, None)

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
        """Close connections that were idle for a while, except those that listen."""
        self._sweep, now = None, self._loop.time()
        listeners = list(self._listeners.values()) if self._callbacks else []
        kept: list[tuple[Connection, float]] = []
        for connection, used in self._idle:
            if now - used < self._idle_s or connection in listeners:
                kept.append((connection, used))
            else:
                connection.terminate()
        self._idle = kept
        if kept:
            self._sweep = self._loop.call_later(self._idle_s, self._close_idle)

    def _notify(self, _connection: object, _pid: int, channel: str, payload: object) -> None:
        for callback, channels in list(self._callbacks.items()):
            if channel in channels:
                callback(str(payload))


_pools: dict[Hashable, Pool] = {}


def shared_pool(key: Hashable, make: Callable[[], Pool]) -> Pool:
    """The pool of this event loop for a key; the first call creates it."""
    whole = (asyncio.get_running_loop(), key)
    pool = _pools.get(whole)
    if pool is None:
        pool = _pools[whole] = make()
        pool.key = whole
    pool.users += 1
    return pool


async def release_pool(pool: Pool) -> None:
    """Stop using a pool; the last user closes its connections."""
    pool.users -= 1
    if pool.users == 0:
        _pools.pop(pool.key, None)  # by key: other threads change the dict too
        await pool.close()
