"""Migrations: bring a database to the schema of this version, and refuse any other schema.

`migrations/<dialect>/0001_name.sql` are numbered files. Each is applied once, in order and under a
lock, and recorded with its checksum in `tenure_migrations`.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tenure.core.errors import Conflict, ServerError, UsageError
from tenure.sql.operations import PACKAGE, Dialect, split, statement_text
from tenure.store.files import package_folder, private_database
from tenure.store.sqlite import FairLock

if TYPE_CHECKING:
    from tenure.store.postgres import Postgres

_LOOP = re.compile(r"^-- @for (\w+) in ([\w ]+)\n(.*?)^-- @end$", re.MULTILINE | re.DOTALL)
_SEQUENCES = {
    **{
        f"{table}_seq_seq": (table, "seq")
        for table in ("inbox_jobs", "job_outbox_events", "plane_jobs", "job_journal", "audit_log")
    },
    "webhook_secrets_id_seq": ("webhook_secrets", "id"),
}

Applied = dict[int, str]
"""Number and checksum of each migration that a database has."""


class Migratable(Protocol):
    """A database to which migrations can be applied."""

    async def applied(self) -> Applied:
        """The migrations that it has; {} for an empty database."""

    async def apply(self, number: int, name: str, checksum: str, text: str) -> None:
        """Apply one and record it, both or neither."""


def load_migrations(dialect: Dialect) -> list[tuple[int, str, str]]:
    """The numbered migrations: number, name, text with its loops unrolled."""
    found = []
    folder = package_folder(PACKAGE, "migrations", dialect)
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".sql"):
            number, _, name = entry.name.removesuffix(".sql").partition("_")
            found.append((int(number), name, _unrolled(entry.read_text(encoding="utf-8"))))
    return found


def known(dialect: Dialect) -> list[tuple[int, str, str, str]]:
    """The migrations of this version: number, name, checksum, text."""
    return [
        (number, name, hashlib.sha256(text.encode()).hexdigest()[:16], text)
        for number, name, text in load_migrations(dialect)
    ]


async def migrate(database: Migratable, dialect: Dialect) -> list[str]:
    """Apply what is missing; returns the names of what was applied now."""
    done: list[str] = []
    has = await database.applied()
    _refuse_unknown(has, dialect)
    for number, name, checksum, text in known(dialect):
        if number not in has:
            await database.apply(number, name, checksum, text)
            done.append(f"{number:04d}_{name}")
    return done


def _missing(has: Applied, dialect: Dialect) -> list[str]:
    """What a database lacks; raises when it has something else."""
    _refuse_unknown(has, dialect)
    return [f"{number:04d}_{name}" for number, name, _, _ in known(dialect) if number not in has]


def _refuse_unknown(has: Applied, dialect: Dialect) -> None:
    ours = {number: checksum for number, _, checksum, _ in known(dialect)}
    for number, checksum in has.items():
        if number not in ours:
            raise Conflict(
                f"the database has migration {number}, which this version does not know: "
                "it belongs to a later version"
            )
        if ours[number] != checksum:
            raise Conflict(f"migration {number} was changed after it was applied to this database")


def _is_migrated(tables: Collection[str]) -> bool:
    """Whether a database has migrations; raises for one from before the first release."""
    if "tenure_migrations" in tables:
        return True
    if "ledger_migrations" in tables:
        raise Conflict(
            "the database was made by a version before the first release, whose tables this "
            "version cannot read: use a new SQLite file or PostgreSQL schema (`?schema=NAME`), or "
            "remove the old one, and run `tenure db migrate`"
        )
    return False


def _unrolled(text: str) -> str:
    """Repeat the text between `-- @for table in a b` and `-- @end` for each word."""

    def each(match: re.Match[str]) -> str:
        variable, words, body = match.groups()
        return "".join(body.replace(f"{{{variable}}}", word) for word in words.split())

    return _LOOP.sub(each, text)


def _warn_of_counters(tables: list[str]) -> None:
    # A program that only reads a queue does not import the logger.
    import structlog

    structlog.get_logger("tenure.sql").warning(
        "another program moved the counter of tables to its end; it was set back", tables=tables
    )


class PostgresMigrations:
    """Migrations of one schema; two programs at once run one after the other."""

    def __init__(self, database: Postgres) -> None:
        self._database = database
        self._schema = database.schema

    async def applied(self) -> Applied:
        found = await self._database.fetch(
            "SELECT tablename FROM pg_tables WHERE schemaname = $1", [self._schema]
        )
        if not _is_migrated([row["tablename"] for row in found]):
            return {}
        rows = await self._database.fetch("SELECT number, checksum FROM tenure_migrations", [])
        return {row["number"]: row["checksum"] for row in rows}

    async def apply(self, number: int, name: str, checksum: str, text: str) -> None:
        # Names and checksums are ours: letters, digits and underscores.
        note = f"INSERT INTO tenure_migrations VALUES ({number}, '{name}', '{checksum}')"  # nosec B608 # see above
        try:
            await self._database.script(
                f"CREATE SCHEMA IF NOT EXISTS {self._schema}; BEGIN;"
                " SELECT pg_advisory_xact_lock(7246101);"
                " CREATE TABLE IF NOT EXISTS tenure_migrations (number integer PRIMARY KEY,"
                " name text NOT NULL, checksum text NOT NULL,"
                f" applied_at timestamptz DEFAULT now()); {note}; {text}; COMMIT"
            )
        except ServerError:
            if (await self.applied()).get(number) != checksum:  # else another program was faster
                raise


async def check_version(database: Postgres) -> None:
    """Raise unless the schema is the one this version needs."""
    lacks = _missing(await PostgresMigrations(database).applied(), "postgres")
    if lacks:
        raise UsageError(
            f"schema {database.schema!r} lacks {', '.join(lacks)}; "
            "run `tenure db migrate --queue URL` first"
        )


async def repair_sequences(database: Postgres) -> None:
    """Reset the sequences that another program moved to their end.

    The lock waits for transactions whose rows are not visible yet.
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
        _warn_of_counters([table])


class SqliteMigrations:
    """Migrations of one file; two programs at once run one after the other."""

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
            return _applied_to_file(connection)
        finally:
            connection.close()

    def _apply(self, number: int, name: str, checksum: str, text: str) -> None:
        lock = FairLock(self._path)
        private_database(self._path)
        connection = sqlite3.connect(self._path, isolation_level=None)
        try:
            with lock:
                connection.execute("PRAGMA journal_mode = WAL")
                if number not in _applied_to_file(connection):  # else another program was faster
                    _apply_to_file(connection, number, name, checksum, text)
        finally:
            connection.close()
            lock.close()


def prepare_file(connection: sqlite3.Connection) -> None:
    """Make the tables in an empty file, or check them; then make the connection's temp tables."""
    has = _applied_to_file(connection)
    if not has and not _tables(connection):
        for migration in known("sqlite"):
            _apply_to_file(connection, *migration)
    elif lacks := _missing(has, "sqlite"):
        raise UsageError(f"the SQLite file lacks {', '.join(lacks)}; run `tenure db migrate` first")
    repair_counters(connection)
    _run_script(connection, "temp_tables")


def repair_counters(connection: sqlite3.Connection) -> None:
    """Reset the AUTOINCREMENT of tables that another program moved to its end."""
    beyond = f"SELECT name FROM sqlite_sequence WHERE seq >= {2**62}"  # nosec B608 # a constant
    if tables := [row[0] for row in connection.execute(beyond).fetchall()]:
        connection.execute("SAVEPOINT counters")
        _run_script(connection, "repair_counters")
        connection.execute("RELEASE counters")
        _warn_of_counters(tables)


def _run_script(connection: sqlite3.Connection, name: str) -> None:
    for statement in split(_unrolled(statement_text("sqlite", name))):
        connection.execute(statement)


def _applied_to_file(connection: sqlite3.Connection) -> Applied:
    if not _is_migrated(_tables(connection)):
        return {}
    rows = connection.execute("SELECT number, checksum FROM tenure_migrations")
    return {row[0]: row[1] for row in rows}


def _apply_to_file(
    connection: sqlite3.Connection, number: int, name: str, checksum: str, text: str
) -> None:
    """Apply one migration and record it, both or neither."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS tenure_migrations (number INTEGER PRIMARY KEY,"
            " name TEXT NOT NULL, checksum TEXT NOT NULL,"
            " applied_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP)"
        )
        for statement in split(text):
            connection.execute(statement)
        connection.execute(
            "INSERT INTO tenure_migrations (number, name, checksum) VALUES (?, ?, ?)",
            (number, name, checksum),
        )
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _tables(connection: sqlite3.Connection) -> set[str]:
    return {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
