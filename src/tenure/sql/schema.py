"""Migrations: bring a database to the schema of this version, and refuse any other schema.

`migrations/<dialect>/0001_name.sql` are numbered files. Each is applied once, in order and under a
lock, and recorded with its checksum in `tenure_migrations`.

Programs of an earlier version go on with a later schema: a migration adds, and what an earlier
version does not use disturbs it not. One that takes something away says in its name from which
migration on a program can do without: `0009_no_stages_needs_0007`. A program that does not know
migration 7 then refuses the database.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import sqlite3
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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


class Record(NamedTuple):
    """What a database says of a migration that it has."""

    checksum: str
    name: str


Applied = dict[int, Record]
"""The migrations that a database has, by number."""

_NEEDS = re.compile(r"_needs_(\d{4})$")


class Migratable(Protocol):
    """A database to which migrations can be applied."""

    async def applied(self) -> Applied:
        """The migrations that it has; {} for an empty database."""

    async def apply(self, number: int, name: str, checksum: str, text: str) -> None:
        """Apply one and record it, both or neither."""

    async def script(self, number: int, name: str, checksum: str, text: str) -> str:
        """What `apply` would run, for the database's own command-line client."""


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
    missing = _missing(await database.applied(), dialect)
    for step in missing:
        await database.apply(*step)
    return _names(missing)


async def migration_script(database: Migratable, dialect: Dialect) -> str:
    """What `migrate` would run, as a script for psql or sqlite3; "" if nothing is missing."""
    missing = _missing(await database.applied(), dialect)
    return "\n".join([await database.script(*step) for step in missing])


def _missing(has: Applied, dialect: Dialect) -> list[tuple[int, str, str, str]]:
    """The migrations that a database lacks; raises when this version cannot use its schema."""
    ours = {number: checksum for number, _, checksum, _ in known(dialect)}
    for number, record in has.items():
        if number in ours:
            if ours[number] != record.checksum:
                raise Conflict(
                    f"migration {number} was changed after it was applied to this database"
                )
        elif (needed := _NEEDS.search(record.name)) and int(needed[1]) > max(ours):
            raise Conflict(
                f"the database has migration {number:04d}_{record.name} of a later version, which "
                f"programs can use that know migration {needed[1]}; this one knows those up to "
                f"{max(ours):04d}: upgrade it"
            )
    return [step for step in known(dialect) if step[0] not in has]


def _names(steps: Iterable[tuple[int, str, str, str]]) -> list[str]:
    return [f"{number:04d}_{name}" for number, name, _, _ in steps]


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
        try:
            rows = await self._database.fetch(
                "SELECT number, checksum, name FROM tenure_migrations", []
            )
        except ServerError as error:
            rights = await self._rights()
            if rights["may_use"]:
                raise
            raise UsageError(  # else: "relation does not exist"
                f"role {rights['role']} may not use schema {self._schema} of database "
                f"{rights['database']}; as its owner: GRANT USAGE ON SCHEMA {self._schema} TO "
                f"{rights['role']}, and the rights on its tables",
                reply=error.reply,
            ) from error
        return {row["number"]: Record(row["checksum"], row["name"]) for row in rows}

    async def apply(self, number: int, name: str, checksum: str, text: str) -> None:
        rights = await self._rights()
        self._require(rights)
        try:
            if not rights["there"]:
                await self._database.script(f"{_MIGRATION_LOCK};\n{self._create_schema()}")
            await self._database.script(_postgres_step(number, name, checksum, text))
        except ServerError:
            has = await self.applied()
            if number not in has or has[number].checksum != checksum:
                raise  # else another program was faster

    async def script(self, number: int, name: str, checksum: str, text: str) -> str:
        rights = await self._rights()
        create = "" if rights["there"] else f"{self._create_schema()};\n"
        return (
            f"-- {number:04d}_{name}\nBEGIN;\n{create}SET LOCAL search_path = '{self._schema}';\n"
            f"{_postgres_step(number, name, checksum, text)}COMMIT;\n"
        )

    def _create_schema(self) -> str:
        return f'CREATE SCHEMA IF NOT EXISTS "{self._schema}"'

    async def _rights(self) -> Any:
        return (await self._database.fetch(_RIGHTS, [self._schema]))[0]

    def _require(self, rights: Any) -> None:
        """Raise a `UsageError` that names the right which the role lacks."""
        role, database, schema = rights["role"], rights["database"], self._schema
        if not rights["there"] and not rights["may_create_schema"]:
            raise UsageError(
                f"there is no schema {schema} in database {database}, and role {role} may not "
                f"create it; as owner of the database: CREATE SCHEMA {schema} AUTHORIZATION "
                f"{role}, or have the owner run what `tenure db migrate --sql` prints"
            )
        if rights["there"] and not rights["may_create"]:
            raise UsageError(
                f"role {role} may not create tables in schema {schema} of database {database}; as "
                f"its owner: GRANT USAGE, CREATE ON SCHEMA {schema} TO {role}, or have the owner "
                "run what `tenure db migrate --sql` prints"
            )


_MIGRATION_LOCK = "SELECT pg_advisory_xact_lock(7246101)"
_RIGHTS = """
SELECT current_user::text AS role, current_database()::text AS database, n.oid IS NOT NULL AS there,
  has_database_privilege(current_database(), 'CREATE') AS may_create_schema,
  coalesce(has_schema_privilege(n.oid, 'CREATE'), false) AS may_create,
  coalesce(has_schema_privilege(n.oid, 'USAGE'), false) AS may_use
FROM (SELECT 1) one LEFT JOIN pg_namespace n ON n.nspname = $1
"""


def _postgres_step(number: int, name: str, checksum: str, text: str) -> str:
    # Names and checksums are ours: letters, digits and underscores.
    return (
        f"{_MIGRATION_LOCK};\n"
        "CREATE TABLE IF NOT EXISTS tenure_migrations (number integer PRIMARY KEY,"
        " name text NOT NULL, checksum text NOT NULL, applied_at timestamptz DEFAULT now());\n"
        f"INSERT INTO tenure_migrations VALUES ({number}, '{name}', '{checksum}');\n{text}\n"  # nosec B608 # see above
    )


async def check_version(database: Postgres) -> None:
    """Raise unless the schema is the one this version needs."""
    if lacks := _names(_missing(await PostgresMigrations(database).applied(), "postgres")):
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
            f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE; SELECT setval('{name}',"  # nosec B608 # our own names
            f" ({last}), false) FROM {name} WHERE last_value >= {2**62}"
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

    async def script(self, number: int, name: str, checksum: str, text: str) -> str:
        # Names and checksums are ours: letters, digits and underscores.
        note = (
            "INSERT INTO tenure_migrations (number, name, checksum)"  # nosec B608 # see above
            f" VALUES ({number}, '{name}', '{checksum}')"
        )
        begin = f"-- {number:04d}_{name}\nBEGIN IMMEDIATE;\n{_SQLITE_TABLE};\n{note};\n"
        return f"PRAGMA journal_mode = WAL;\n{begin}{text}\nCOMMIT;\n"

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


_SQLITE_TABLE = (
    "CREATE TABLE IF NOT EXISTS tenure_migrations (number INTEGER PRIMARY KEY, name TEXT NOT NULL,"
    " checksum TEXT NOT NULL, applied_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP)"
)


def prepare_file(connection: sqlite3.Connection) -> None:
    """Make the tables in an empty file, or check them; then make the connection's temp tables."""
    has = _applied_to_file(connection)
    if not has and not _tables(connection):
        for migration in known("sqlite"):
            _apply_to_file(connection, *migration)
    elif lacks := _names(_missing(has, "sqlite")):
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
    rows = connection.execute("SELECT number, checksum, name FROM tenure_migrations")
    return {row[0]: Record(row[1], row[2]) for row in rows}


def _apply_to_file(
    connection: sqlite3.Connection, number: int, name: str, checksum: str, text: str
) -> None:
    """Apply one migration and record it, both or neither."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(_SQLITE_TABLE)
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
