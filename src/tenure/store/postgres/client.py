"""A small PostgreSQL client for queues: one statement per call, and errors that say what happened.

A call is a single statement that commits by itself, in one round trip, and is never sent again
here. If no answer comes it raises `ReplyLost`; the caller can repeat it, because its calls carry
ids and fences. Behind a pooler in transaction mode a call has a transaction of its own
(`store.postgres.session`).

The planner's choices are fixed. A queue's tables grow from empty to huge within seconds, faster
than the statistics follow, and every statement of ours should use an index. Just-in-time
compilation would take longer than the statements.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import asyncpg

from tenure.core.errors import ReplyLost, ServerError, StoreError, StoreUnreachable, UsageError
from tenure.store.postgres.address import PostgresAddress, parse_postgres_url
from tenure.store.postgres.session import (
    FAULTS,
    Callback,
    Connection,
    Dialer,
    Pool,
    release_pool,
    shared_pool,
)

CONNECTIONS_MAX = 3
CALL_TIMEOUT_S = 30.0
_CHUNK_BYTES = 65_536

_PINNED = {
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
# The server is stopping or starting, or is a replica, and did not execute the statement.
_REFUSES_CALLS = (
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.ReadOnlySQLTransactionError,
)
# The values can never be stored, so repeating the call is useless.
_UNSTORABLE = (asyncpg.DataError, asyncpg.ProgramLimitExceededError)
_ENDED = (asyncpg.AdminShutdownError, asyncpg.CrashShutdownError, asyncpg.QueryCanceledError)


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
        self._address = parse_postgres_url(url)
        self._settings = {
            "search_path": schema,
            "synchronous_commit": "on" if durable else "off",
            **(_PINNED if pinned else {"jit": "off"}),
        }
        self._connections_max = connections
        self._pool: Pool | None = None
        self._notice_pool: Pool | None = None
        self._closed = False

    async def fetch(self, statement: str, arguments: Sequence[Any]) -> list[asyncpg.Record]:
        """Run one statement; returns its rows."""
        async with self.connection() as connection:
            try:
                if not connection.begin:
                    return await _fetch(connection, statement, arguments)
                async with _transaction(connection):
                    return await _fetch(connection, statement, arguments)
            except FAULTS as error:
                raise self._translated(error, connection) from error

    async def script(self, text: str) -> None:
        """Run statements without parameters in one transaction, however long it takes."""
        async with self.connection() as connection:
            try:
                begin = connection.begin or "BEGIN"
                await connection.execute(
                    f"{begin}; SET LOCAL statement_timeout = 0; {text}\n; COMMIT"
                )
            except FAULTS as error:
                with contextlib.suppress(*FAULTS):  # the connection goes back to the pool
                    await connection.execute("ROLLBACK")
                raise self._translated(error, connection) from error

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """A transaction for several calls; any error rolls it back."""
        async with self.connection() as connection:
            try:
                async with _transaction(connection):
                    yield connection
            except FAULTS as error:
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

    async def shares_sessions(self) -> bool:
        """Whether a pooler shares the sessions of this client with others, and nothing sends it
        notices."""
        if self._address.options.notify_address:
            return False
        async with self.connection() as connection:
            return bool(connection.begin)

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """A connection for the caller alone; a broken one is not used again."""
        return self._shared_pool().connection()

    async def listen(self, channel: str, callback: Callback) -> bool | None:
        """Call `callback` for every notification; True if one may have been missed before, None if
        there are none, because a pooler shares the session with others."""
        try:
            return await self._pool_of_notices().listen(channel, callback)
        except (StoreError, *FAULTS):
            return False  # callers poll as well

    def ignore(self, callback: Callback) -> None:
        """No longer call `callback`."""
        if self._notice_pool is not None:
            self._notice_pool.ignore(callback)

    async def close(self) -> None:
        """Stop using the pools; the last client closes their connections."""
        self._closed = True
        pools = [pool for pool in (self._pool, self._notice_pool) if pool is not None]
        self._pool = self._notice_pool = None
        for pool in pools:
            await release_pool(pool)

    def _shared_pool(self) -> Pool:
        if self._pool is None:
            self._pool = self._open_pool(self._address, self._settings, self._connections_max)
        return self._pool

    def _pool_of_notices(self) -> Pool:
        if self._notice_pool is None:
            if self._address.options.notify_address:
                self._notice_pool = self._open_pool(self._address.for_notices(), {}, 1)
            else:
                self._notice_pool = self._open_pool(
                    self._address, self._settings, self._connections_max
                )
        return self._notice_pool

    def _open_pool(
        self, address: PostgresAddress, settings: Mapping[str, str], connections: int
    ) -> Pool:
        if self._closed:
            raise StoreUnreachable(f"PostgreSQL at {address.label}: closed by this program")
        key: Hashable = (self.url, address.label, *settings.items(), connections)
        return shared_pool(
            key, lambda: Pool(Dialer(address, settings), connections, address.options.idle_s)
        )

    def _translated(self, error: BaseException, connection: Connection) -> StoreError | UsageError:
        address = self._address.label
        if isinstance(error, asyncpg.PostgresError):
            error.detail = None  # it has the contents of the row, which must not be logged
        if isinstance(error, _REFUSES_CALLS):
            connection.terminate()  # the next one may lead to another server
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
            hint = _RIGHTS if isinstance(error, asyncpg.InsufficientPrivilegeError) else ""
            return ServerError(f"PostgreSQL at {address} refused: {error}{hint}", reply=error)
        return ReplyLost(f"the connection to PostgreSQL at {address} broke: {error}")


_RIGHTS = (
    "; the role of a queue needs USAGE on the schema, SELECT, INSERT, UPDATE and DELETE on all its "
    "tables, and USAGE, SELECT and UPDATE on all its sequences"
)


async def _fetch(
    connection: Connection, statement: str, arguments: Sequence[Any]
) -> list[asyncpg.Record]:
    rows: list[asyncpg.Record] = await connection.fetch(
        statement, *arguments, timeout=CALL_TIMEOUT_S
    )
    return rows


@contextlib.asynccontextmanager
async def _transaction(connection: Connection) -> AsyncIterator[None]:
    """A transaction, with the settings of this client where the session is not its own.

    After a cancellation the connection is not used again, so the transaction ends with it.
    """
    await connection.execute(connection.begin or "BEGIN", timeout=CALL_TIMEOUT_S)
    try:
        yield
    except Exception:
        with contextlib.suppress(*FAULTS):
            await connection.execute("ROLLBACK", timeout=CALL_TIMEOUT_S)
        raise
    await connection.execute("COMMIT", timeout=CALL_TIMEOUT_S)
