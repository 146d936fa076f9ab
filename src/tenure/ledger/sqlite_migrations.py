"""The migrations of a SQLite file, and what every connection of ours prepares in it."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

from tenure.core.errors import UsageError
from tenure.ledger.engine import PACKAGE
from tenure.ledger.migrating import TABLE, Applied, has_migrations, known, missing, warn_of_places
from tenure.store.beside import folder_beside
from tenure.store.private import private_database
from tenure.store.statements import split, unrolled
from tenure.store.turnstile import Turnstile


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
