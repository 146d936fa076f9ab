"""Connections to a PostgreSQL database, shared by all of one event loop that ask for the same ones.

They are opened when needed, up to a limit, and closed when nothing used them for a while. The one
that listens for notices is one of them: notices arrive on it between the statements of others.
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


CONNECTIONS_MAX = 3
CALL_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
_CHUNK = 65_536

_PINNED = {
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
_GONE = (asyncpg.PostgresConnectionError, asyncpg.InterfaceError, OSError, EOFError)
# The server says that it ends or begins: nothing of the statement is left.
_AWAY = (asyncpg.CannotConnectNowError, asyncpg.TooManyConnectionsError)
# What the statement was given can never be stored: the same call again would end the same way.
_UNSTORABLE = (asyncpg.DataError, asyncpg.ProgramLimitExceededError)
_FAULTS = (*_GONE, asyncpg.PostgresError, TimeoutError)
_ENDED = (asyncpg.AdminShutdownError, asyncpg.CrashShutdownError, asyncpg.QueryCanceledError)


@dataclass(frozen=True, slots=True)
class Copied:
    """Rows of a table, packed for COPY in its binary form."""

    table: str
    columns: Sequence[str]
    rows: bytes


class Postgres:
    """A user of one database and schema, for one event loop; all users share the connections."""

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
        """Run one prepared statement and return its rows."""
        async with self.connection() as connection:
            try:
                rows: list[asyncpg.Record] = await connection.fetch(
                    statement, *arguments, timeout=CALL_TIMEOUT_S
                )
                return rows
            except _FAULTS as error:
                raise self._told(error, connection) from error

    async def script(self, text: str) -> None:
        """Run statements without parameters, in the transaction that they open themselves."""
        async with self.connection() as connection:
            try:
                await connection.execute(text)
            except _FAULTS as error:
                with contextlib.suppress(*_FAULTS):  # others use the connection after this
                    await connection.execute("ROLLBACK")
                raise self._told(error, connection) from error

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """A transaction of several calls: committed at its end, and undone by any error."""
        async with self.connection() as connection:
            try:
                async with connection.transaction():
                    yield connection
            except _FAULTS as error:
                raise self._told(error, connection) from error

    async def copy(self, connection: Connection, rows: Copied) -> None:
        """Put rows into a table by COPY, within a transaction."""
        await connection.copy_to_table(
            rows.table,
            source=_chunks(rows.rows),
            columns=list(rows.columns),
            format="binary",
            timeout=CALL_TIMEOUT_S,
        )

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """A connection of one's own for a moment; one that broke is not used again."""
        return self._joined().connection()

    async def listen(self, channel: str, heard: Heard) -> bool:
        """Call `heard` for every notice; True when one may have been missed until now."""
        try:
            return await self._joined().listen(channel, heard)
        except (StoreError, *_FAULTS):
            return False  # whoever waits looks by itself now and then

    def ignore(self, heard: Heard) -> None:
        """No longer call `heard`."""
        if self._pool is not None:
            self._pool.ignore(heard)

    async def close(self) -> None:
        """Leave the connections to others who use them; the last one closes them."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            await leave(pool)

    def _joined(self) -> Pool:
        if self._closed:
            raise StoreUnreachable(f"PostgreSQL at {_place(self.url)}: closed by this program")
        if self._pool is None:
            key = (self.url, *self._settings.items(), self._connections_max)
            self._pool = join(key, lambda: Pool(self._connect, self._connections_max))
        return self._pool

    async def _connect(self) -> Connection:
        try:
            return await asyncpg.connect(
                **connect_arguments(self.url, self._settings),
                statement_cache_size=200,
                max_cached_statement_lifetime=0,
            )
        except (*_GONE, asyncpg.PostgresError, TimeoutError) as error:
            raise StoreUnreachable(
                f"PostgreSQL at {_place(self.url)} cannot be reached: {error or type(error)}"
            ) from error

    def _told(self, error: BaseException, connection: Connection) -> StoreError | UsageError:
        place = _place(self.url)
        if isinstance(error, asyncpg.PostgresError):
            error.detail = None  # the contents of the row, which belong in no log
        if isinstance(error, _AWAY):
            return StoreUnreachable(f"PostgreSQL at {place} takes no calls now: {error}")
        if isinstance(error, _ENDED):
            connection.terminate()
            return ReplyLost(f"PostgreSQL at {place} ended the call: {error}")
        if isinstance(error, TimeoutError):
            connection.terminate()
            return ReplyLost(f"PostgreSQL at {place} did not answer in {CALL_TIMEOUT_S:.0f} s")
        if isinstance(error, _UNSTORABLE):
            return UsageError(f"PostgreSQL at {place} cannot store this: {error}", reply=error)
        refused = isinstance(error, asyncpg.PostgresError | asyncpg.InterfaceError)
        if refused and not connection.is_closed():
            return ServerError(f"PostgreSQL at {place} refused: {error}", reply=error)
        return ReplyLost(f"the connection to PostgreSQL at {place} broke: {error}")


def connect_arguments(url: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `asyncpg.connect` for a URL with libpq's options, as libpq reads them.

    `host` and `port` of the query replace those of the address, `application_name` replaces ours,
    `connect_timeout` is in seconds. TLS options, `options` and names of server settings reach the
    driver as they are; `settings` are what the statements rely on and go before all.

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
        "timeout": float(timeout or 0) or CONNECT_TIMEOUT_S,
    }
    if host := given.pop("host", ""):
        made["host"] = host.split(",")
        if port := given.pop("port", ""):
            made["port"] = [int(each) for each in port.split(",")]
    made["dsn"] = address + (f"?{urlencode(given, quote_via=quote)}" if given else "")
    return made


async def _chunks(rows: bytes) -> AsyncIterator[bytes]:
    """Parts small enough that the server begins before the last of them is sent."""
    for at in range(0, len(rows), _CHUNK):
        yield rows[at : at + _CHUNK]


def _place(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname or 'its socket'}:{parts.port or 5432}{parts.path}"
