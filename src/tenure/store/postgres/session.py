"""Opens connections to PostgreSQL, directly or through a pooler such as PgBouncer, and shares them
within an event loop.

A pooler refuses startup parameters that it does not know, so the settings that our statements rely
on are sent afterwards. In a session of our own they are set once. A pooler in transaction mode may
give every transaction to another session, which other programs use too. There the settings are set
for one transaction at a time, each statement is in such a transaction, and there are no notices.

Whether there is a pooler is known by the process id: a pooler tells its clients numbers of its own.
Statements are prepared by name where that works: a pooler that knows prepared statements (PgBouncer
from 1.21 on) gives them names of its own in the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping
from typing import TypeAlias

import asyncpg

from tenure.core.errors import ServerError, StoreUnreachable, UsageError
from tenure.store.postgres.address import PostgresAddress

FAULTS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    OSError,  # includes TimeoutError
    EOFError,
)
Callback: TypeAlias = Callable[[str], None]
"""Receives the payload of a notification."""

IDLE_S = 30.0

_CACHED_STATEMENTS = 200
_WITHIN_S = 10.0
_PROCESS = "SELECT pg_backend_pid()"
_PREPARED = "SELECT name FROM pg_prepared_statements"


class Connection(asyncpg.Connection):  # type: ignore[misc] # mypy has no types of asyncpg
    """A connection. `begin` begins a transaction where each needs one, because a pooler gives the
    session for one transaction; else it is empty."""

    begin = ""


class Dialer:
    """Opens connections of one kind."""

    def __init__(self, address: PostgresAddress, settings: Mapping[str, str]) -> None:
        self._address = address
        if timeout_ms := address.options.statement_timeout_ms:
            settings = {**settings, "statement_timeout": str(timeout_ms)}
        self._settings = settings
        self._cached_statements = _CACHED_STATEMENTS

    async def __call__(self) -> Connection:
        """A new connection, ready for statements."""
        address = self._address
        login = await asyncio.to_thread(address.current_login) if address.login else None
        try:
            cached = self._cached_statements  # another call may change it meanwhile
            connection = await self._connect(login, cached)
            if not await self._ready(connection, cached):
                connection.terminate()
                self._cached_statements = 0
                connection = await self._connect(login, 0)
                await self._ready(connection, 0)
            return connection
        except asyncpg.ClientConfigurationError as error:
            raise UsageError(f"PostgreSQL URL for {address.label}: {error}") from None
        except FAULTS as error:
            raise StoreUnreachable(
                f"PostgreSQL at {address.label} cannot be reached: {error or type(error)}"
            ) from error

    async def _connect(self, login: tuple[str, str] | None, cached: int) -> Connection:
        connection: Connection = await asyncpg.connect(
            **self._address.arguments(login),
            connection_class=Connection,
            statement_cache_size=cached,
            max_cached_statement_lifetime=0,
        )
        return connection

    async def _ready(self, connection: Connection, cached: int) -> bool:
        """Make the session ready; False if its statements must not be cached, and `cached` are."""
        try:
            async with asyncio.timeout(_WITHIN_S):
                if await self._is_own_session(connection):
                    if self._settings:
                        await connection.execute(self._set("SET"))
                    return True
                connection.begin = f"BEGIN; {self._set('SET LOCAL')}"
                return not cached or await _keeps_statements(connection)
        except BaseException:
            connection.terminate()
            raise

    async def _is_own_session(self, connection: Connection) -> bool:
        pooling = self._address.options.pooling
        if pooling != "auto":
            return pooling == "session"
        # In a transaction, and without a name: safe with every pooler.
        await connection.execute("BEGIN")
        process = await (await connection.prepare(_PROCESS, name="")).fetchval()
        await connection.execute("COMMIT")
        return bool(process == connection.get_server_pid())

    def _set(self, command: str) -> str:
        return "; ".join(f"{command} {name} = '{self._settings[name]}'" for name in self._settings)


async def _keeps_statements(connection: Connection) -> bool:
    """Whether the pooler knows prepared statements: then the session has them by other names."""
    name = f"tenure_{secrets.token_hex(8)}"
    await connection.execute("BEGIN")
    rows = await (await connection.prepare(_PREPARED, name=name)).fetch()
    keeps = all(row["name"] != name for row in rows)
    await connection.execute("COMMIT" if keeps else f"DEALLOCATE {name}; COMMIT")
    return keeps


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
