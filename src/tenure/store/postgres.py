"""A small PostgreSQL client for queues: one statement per call, and errors that say what happened.

A call is a single statement that commits by itself, in one round trip, and is never sent again
here. If no answer comes it raises `ReplyLost`; the caller can repeat it, because its calls carry
ids and fences.

The planner's choices are fixed. A queue's tables grow from empty to huge within seconds, faster
than the statistics follow, and every statement of ours should use an index. Just-in-time
compilation would take longer than the statements.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import asyncpg

from tenure.core.errors import ReplyLost, ServerError, StoreError, StoreUnreachable, UsageError

CONNECTIONS_MAX = 3
IDLE_S = 30.0
CALL_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5.0
_CHUNK_BYTES = 65_536

_PINNED = {
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
_FAULTS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    OSError,  # includes TimeoutError
    EOFError,
)
# The server is stopping or starting, and did not execute the statement.
_REFUSES_CALLS = (asyncpg.CannotConnectNowError, asyncpg.TooManyConnectionsError)
# The values can never be stored, so repeating the call is useless.
_UNSTORABLE = (asyncpg.DataError, asyncpg.ProgramLimitExceededError)
_ENDED = (asyncpg.AdminShutdownError, asyncpg.CrashShutdownError, asyncpg.QueryCanceledError)

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
Callback: TypeAlias = Callable[[str], None]
"""Receives the payload of a notification."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Rows of a table, encoded for binary COPY."""

    table: str
    columns: Sequence[str]
    rows: bytes


class Postgres:
    """A client of one database and schema, for one event loop; clients share a pool."""

    def __init__(
        self,
        url: str,
        *,
        schema: str,
        durable: bool = True,
        pinned: bool = True,
        connections: int = CONNECTIONS_MAX,
    ) -> None:
        self.url = url
        self.schema = schema
        self._settings = {
            "search_path": schema,
            "synchronous_commit": "on" if durable else "off",
            **(_PINNED if pinned else {"jit": "off"}),
        }
        self._connections_max = connections
        self._pool: Pool | None = None
        self._closed = False

    async def fetch(self, statement: str, arguments: Sequence[Any]) -> list[asyncpg.Record]:
        """Run one prepared statement; returns its rows."""
        async with self.connection() as connection:
            try:
                rows: list[asyncpg.Record] = await connection.fetch(
                    statement, *arguments, timeout=CALL_TIMEOUT_S
                )
                return rows
            except _FAULTS as error:
                raise self._translated(error, connection) from error

    async def script(self, text: str) -> None:
        """Run statements without parameters, in the transaction that they open themselves."""
        async with self.connection() as connection:
            try:
                await connection.execute(text)
            except _FAULTS as error:
                with contextlib.suppress(*_FAULTS):  # the connection goes back to the pool
                    await connection.execute("ROLLBACK")
                raise self._translated(error, connection) from error

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """A transaction for several calls; any error rolls it back."""
        async with self.connection() as connection:
            try:
                async with connection.transaction():
                    yield connection
            except _FAULTS as error:
                raise self._translated(error, connection) from error

    async def copy(self, connection: Connection, rows: Copied) -> None:
        """Insert rows by COPY, within a transaction."""

        async def chunks() -> AsyncIterator[bytes]:
            # In chunks, so that the server begins before the last one is sent.
            for at in range(0, len(rows.rows), _CHUNK_BYTES):
                yield rows.rows[at : at + _CHUNK_BYTES]

        await connection.copy_to_table(
            rows.table,
            source=chunks(),
            columns=list(rows.columns),
            format="binary",
            timeout=CALL_TIMEOUT_S,
        )

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """A connection for the caller alone; a broken one is not used again."""
        return self._shared_pool().connection()

    async def listen(self, channel: str, callback: Callback) -> bool:
        """Call `callback` for every notification; True if one may have been missed before."""
        try:
            return await self._shared_pool().listen(channel, callback)
        except (StoreError, *_FAULTS):
            return False  # callers poll as well

    def ignore(self, callback: Callback) -> None:
        """No longer call `callback`."""
        if self._pool is not None:
            self._pool.ignore(callback)

    async def close(self) -> None:
        """Stop using the pool; the last client closes its connections."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            await release_pool(pool)

    def _shared_pool(self) -> Pool:
        if self._closed:
            raise StoreUnreachable(f"PostgreSQL at {_address(self.url)}: closed by this program")
        if self._pool is None:
            key = (self.url, *self._settings.items(), self._connections_max)
            self._pool = shared_pool(key, lambda: Pool(self._connect, self._connections_max))
        return self._pool

    async def _connect(self) -> Connection:
        try:
            return await asyncpg.connect(
                **connect_arguments(self.url, self._settings),
                statement_cache_size=200,
                max_cached_statement_lifetime=0,
            )
        except _FAULTS as error:
            raise StoreUnreachable(
                f"PostgreSQL at {_address(self.url)} cannot be reached: {error or type(error)}"
            ) from error

    def _translated(self, error: BaseException, connection: Connection) -> StoreError | UsageError:
        address = _address(self.url)
        if isinstance(error, asyncpg.PostgresError):
            error.detail = None  # it has the contents of the row, which must not be logged
        if isinstance(error, _REFUSES_CALLS):
            return StoreUnreachable(f"PostgreSQL at {address} takes no calls now: {error}")
        if isinstance(error, _ENDED):
            connection.terminate()
            return ReplyLost(f"PostgreSQL at {address} ended the call: {error}")
        if isinstance(error, TimeoutError):
            connection.terminate()
            return ReplyLost(f"PostgreSQL at {address} did not answer in {CALL_TIMEOUT_S:.0f} s")
        if isinstance(error, _UNSTORABLE):
            return UsageError(f"PostgreSQL at {address} cannot store this: {error}", reply=error)
        refused = isinstance(error, asyncpg.PostgresError | asyncpg.InterfaceError)
        if refused and not connection.is_closed():
            return ServerError(f"PostgreSQL at {address} refused: {error}", reply=error)
        return ReplyLost(f"the connection to PostgreSQL at {address} broke: {error}")


def connect_arguments(url: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `asyncpg.connect` for a URL with libpq's options, as libpq reads them.

    `host` and `port` of the query replace those of the address, `application_name` replaces ours,
    `connect_timeout` is in seconds. TLS options, `options` and names of server settings are passed
    to the driver. `settings` are those that the statements rely on; they override all others.

    >>> made = connect_arguments("postgresql://u@h/db?host=/run/pg&sslmode=verify-full", {})
    >>> made["host"], made["dsn"]
    (['/run/pg'], 'postgresql://u@h/db?sslmode=verify-full')
    """
    address, _, query = url.partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    name = given.pop("application_name", "") or "tenure"
    timeout = given.pop("connect_timeout", "")
    if timeout and not timeout.isdecimal():
        raise UsageError(f"connect_timeout {timeout!r} in the PostgreSQL URL: a number of seconds")
    made: dict[str, Any] = {
        "server_settings": {"application_name": name, **settings},
        "timeout": float(timeout or 0) or _CONNECT_TIMEOUT_S,
    }
    if host := given.pop("host", ""):
        made["host"] = host.split(",")
        if port := given.pop("port", ""):
            made["port"] = [int(each) for each in port.split(",")]
    made["dsn"] = address + (f"?{urlencode(given, quote_via=quote)}" if given else "")
    return made


def _address(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname or 'its socket'}:{parts.port or 5432}{parts.path}"


class Pool:
    """The connections of one event loop with the same settings to the same database.

    They are opened when needed, up to a limit, and closed when idle for a while. asyncpg's own pool
    resets a connection after each use, which is a second round trip, and needs another connection
    for LISTEN. Here notifications arrive on a pooled connection, between other statements.
    """

    def __init__(self, connect: Callable[[], Awaitable[Connection]], connections_max: int) -> None:
        self._connect = connect
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
                        self._sweep = self._loop.call_later(IDLE_S, self._close_idle)
                else:
                    connection.terminate()

    async def listen(self, channel: str, callback: Callback) -> bool:
        """Call `callback` for every notification of a channel; True if one may have been missed
        before."""
        async with self._listen_lock:
            channels = self._callbacks.setdefault(callback, set())
            is_known, listener = channel in channels, self._listeners.get(channel)
            channels.add(channel)
            if listener is not None and not listener.is_closed():
                return not is_known
            async with self.connection() as connection:
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
            if now - used < IDLE_S or connection in listeners:
                kept.append((connection, used))
            else:
                connection.terminate()
        self._idle = kept
        if kept:
            self._sweep = self._loop.call_later(IDLE_S, self._close_idle)

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
