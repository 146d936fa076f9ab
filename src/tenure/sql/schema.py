"""Migrations: bring a database to the schema of this version, and refuse every other schema."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tenure.core.errors import Conflict, ServerError, UsageError
from tenure.sql.engine import PACKAGE
from tenure.sql.operations import Dialect, load_migrations, split, unrolled
from tenure.store.beside import folder_beside
from tenure.store.private import private_database
from tenure.store.turnstile import Turnstile

if TYPE_CHECKING:
    from tenure.store.postgres import Postgres

TABLE = "tenure_migrations"
_SEQUENCES = {
    **{
        f"{table}_seq_seq": (table, "seq")
        for table in ("inbox_jobs", "job_outbox_events", "plane_jobs", "job_journal", "audit_log")
    },
    "webhook_secrets_id_seq": ("webhook_secrets", "id"),
}
Applied = dict[int, str]
_BEFORE_RELEASE = "ledger_migrations"


class Migrates(Protocol):
    """A database that can say which migrations it has and take another one."""

    async def applied(self) -> Applied:
        """Number and checksum of each migration it has; {} for a database without any."""

    async def apply(self, number: int, name: str, checksum: str, text: str) -> None:
        """Apply one and note it, both or neither."""


def known(dialect: Dialect) -> list[tuple[int, str, str, str]]:
    """The migrations of this version: number, name, checksum, text."""
    return [
        (number, name, hashlib.sha256(text.encode()).hexdigest()[:16], text)
        for number, name, text in load_migrations(PACKAGE, dialect)
    ]


async def migrate(database: Migrates, dialect: Dialect) -> list[str]:
    """Apply what is missing; returns the names of what was applied now."""
    done: list[str] = []
    has = await database.applied()
    _refuse_strangers(has, dialect)
    for number, name, checksum, text in known(dialect):
        if number not in has:
            await database.apply(number, name, checksum, text)
            done.append(f"{number:04d}_{name}")
    return done


def missing(has: Applied, dialect: Dialect) -> list[str]:
    """What a database lacks; raises when it has something else."""
    _refuse_strangers(has, dialect)
    return [f"{number:04d}_{name}" for number, name, _, _ in known(dialect) if number not in has]


def _refuse_strangers(has: Applied, dialect: Dialect) -> None:
    ours = {number: checksum for number, _, checksum, _ in known(dialect)}
    for number, checksum in has.items():
        if number not in ours:
            raise Conflict(
                f"the database has migration {number}, which this version does not know: "
                "it belongs to a later version"
            )
        if ours[number] != checksum:
            raise Conflict(f"migration {number} was changed after it was applied to this database")


def has_migrations(tables: Collection[str]) -> bool:
    """Whether a database has migrations; raises for one that is older than the first release."""
    if TABLE in tables:
        return True
    if _BEFORE_RELEASE in tables:
        raise Conflict(
            "the database was made by a version before the first release, whose tables this "
            "version cannot read: use a new SQLite file or PostgreSQL schema (`?schema=NAME`), or "
            "remove the old one, and run `tenure db migrate`"
        )
    return False


class PostgresMigrations:
    """Migrations of one schema; two programs at once are one after the other."""

    def __init__(self, database: Postgres) -> None:
        self._database = database
        self._schema = database.schema

    async def applied(self) -> Applied:
        found = await self._database.fetch(
            "SELECT tablename FROM pg_tables WHERE schemaname = $1", [self._schema]
        )
        if not has_migrations([row["tablename"] for row in found]):
            return {}
        rows = await self._database.fetch(f"SELECT number, checksum FROM {TABLE}", [])  # nosec B608 # a constant
        return {row["number"]: row["checksum"] for row in rows}

    async def apply(self, number: int, name: str, checksum: str, text: str) -> None:
        # Names and checksums are ours: letters, digits and underscores.
        note = f"INSERT INTO {TABLE} VALUES ({number}, '{name}', '{checksum}')"  # nosec B608 # see above
        begin = f"BEGIN; SELECT pg_advisory_xact_lock(7246101); {_OWN_TABLE};"
        try:
            await self._database.script(
                f"CREATE SCHEMA IF NOT EXISTS {self._schema}; {begin} {note}; {text}; COMMIT"
            )
        except ServerError:
            if (await self.applied()).get(number) != checksum:  # else another program was faster
                raise


_OWN_TABLE = (
    f"CREATE TABLE IF NOT EXISTS {TABLE} (number integer PRIMARY KEY,"
    " name text NOT NULL, checksum text NOT NULL, applied_at timestamptz DEFAULT now())"
)


async def mend_sequences(database: Postgres) -> None:
    """Let tables count on whose sequence another program moved to its end.

    The lock waits for transactions that have numbers which nobody else can see yet.
    """
    beyond = (
        "SELECT sequencename AS name FROM pg_sequences"
        f" WHERE schemaname = $1 AND sequencename = ANY($2) AND last_value >= {2**62}"  # nosec B608 # a constant
    )
    found = await database.fetch(beyond, [database.schema, list(_SEQUENCES)])
    for name in [row["name"] for row in found]:
        table, column = _SEQUENCES[name]
        last = f"SELECT coalesce(max({column}), 0) + 1 FROM {table} WHERE {column} < {2**62}"  # nosec B608 # our own names
        await database.script(
            f"BEGIN; LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE; SELECT setval('{name}',"  # nosec B608 # our own names
            f" ({last}), false) FROM {name} WHERE last_value >= {2**62}; COMMIT"
        )
        warn_of_places([table])


def warn_of_places(tables: list[str]) -> None:
    """Write a line. A program that only reads a queue does not load what writes it."""
    import structlog

    structlog.get_logger("tenure.sql").warning(
        "another program moved the counter of tables to its end; it was set back", tables=tables
    )


async def check_version(database: Postgres) -> None:
    """Raise unless the schema is the one this version needs."""
    lacks = missing(await PostgresMigrations(database).applied(), "postgres")
    if lacks:
        raise UsageError(
            f"schema {database.schema!r} lacks {', '.join(lacks)}; "
            "run `tenure db migrate --queue URL` first",
            contract="inbox",
        )


class SqliteMigrations:
    """Migrations of one file; two programs at once are one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def applied(self) -> Applied:
        return await asyncio.to_thread(self._applied)

    async def apply(self, number: int, name: str, checksum: str, text: str) -> None:
        await asyncio.to_thread(self._apply, number, name, checksum, text)

    def _applied(self) -> Applied:
        private_database(self._path)
        connection = sqlite3.connect(self._path, isolation_level=None)
        try:
            return applied(connection)
        finally:
            connection.close()

    def _apply(self, number: int, name: str, checksum: str, text: str) -> None:
        turnstile = Turnstile(self._path)
        private_database(self._path)
        connection = sqlite3.connect(self._path, isolation_level=None)
        try:
            with turnstile:
                connection.execute("PRAGMA journal_mode = WAL")
                if number not in applied(connection):  # else another program was faster
                    apply(connection, number, name, checksum, text)
        finally:
            connection.close()
            turnstile.close()


def prepare(connection: sqlite3.Connection) -> None:
    """Make the tables in an empty file, or check that they are ours; then the session's own."""
    has = applied(connection)
    if not has and not _tables(connection):
        for number, name, checksum, text in known("sqlite"):
            apply(connection, number, name, checksum, text)
    elif lacks := missing(has, "sqlite"):
        raise UsageError(
            f"the SQLite file lacks {', '.join(lacks)}; run `tenure db migrate` first",
            contract="inbox",
        )
    mend_places(connection)
    _run_file(connection, "tables.sql")


def mend_places(connection: sqlite3.Connection) -> None:
    """Let tables count on whose AUTOINCREMENT another program moved to its end."""
    beyond = f"SELECT name FROM sqlite_sequence WHERE seq >= {2**62}"  # nosec B608 # a constant
    if tables := [row[0] for row in connection.execute(beyond).fetchall()]:
        connection.execute("SAVEPOINT places")
        _run_file(connection, "places.sql")
        connection.execute("RELEASE places")
        warn_of_places(tables)


def _run_file(connection: sqlite3.Connection, name: str) -> None:
    text = (folder_beside(PACKAGE, "sql", "sqlite", "session") / name).read_text()
    for statement in split(unrolled(text)):
        connection.execute(statement)


def queues_with_work(connection: sqlite3.Connection) -> list[str]:
    """The queues into whose line this transaction put something; asked once."""
    queues = [row[0] for row in connection.execute("SELECT queue FROM temp.fed")]
    if queues:
        connection.execute("DELETE FROM temp.fed")
    return queues


def applied(connection: sqlite3.Connection) -> Applied:
    """The migrations that a file has."""
    if not has_migrations(_tables(connection)):
        return {}
    rows = connection.execute(f"SELECT number, checksum FROM {TABLE}")  # nosec B608 # a constant
    return {row[0]: row[1] for row in rows}


def apply(connection: sqlite3.Connection, number: int, name: str, checksum: str, text: str) -> None:
    """Apply one migration and note it, both or neither."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(
            f"CREATE TABLE IF NOT EXISTS {TABLE} (number INTEGER PRIMARY KEY,"
            " name TEXT NOT NULL, checksum TEXT NOT NULL,"
            " applied_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP)"
        )
        for statement in split(text):
            connection.execute(statement)
        connection.execute(
            f"INSERT INTO {TABLE} (number, name, checksum) VALUES (?, ?, ?)",  # nosec B608 # a constant
            (number, name, checksum),
        )
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _tables(connection: sqlite3.Connection) -> set[str]:
    return {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
