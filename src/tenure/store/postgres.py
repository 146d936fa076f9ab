"""A small PostgreSQL client for queues: one statement a call, and honest errors.

Every call is a single statement that commits by itself, so a call is one round trip. It is never
sent again from here: an answer that did not come is `ReplyLost`, and the caller, whose calls carry
ids and fences, decides.

Plans are pinned: a queue's tables swing between empty and huge within seconds, faster than
statistics follow, and every statement of ours wants an index. Just-in-time compilation would cost
more than the statements.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import asyncpg

from tenure.core.errors import ReplyLost, ServerError, StoreError, StoreUnreachable, UsageError
from tenure.store.postgres_pool import Connection, Heard, Pool, join, leave

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
