"""Opens connections to PostgreSQL, directly or through a pooler such as PgBouncer.

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
import secrets
from collections.abc import Mapping

import asyncpg

from tenure.core.errors import StoreUnreachable, UsageError
from tenure.store.postgres.address import PostgresAddress

FAULTS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    OSError,  # includes TimeoutError
    EOFError,
)
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
