"""Migrations: applied once, in order, checked at the start, refused when they do not fit."""

import asyncio
import secrets
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner

from tenure.cli.console import group
from tenure.core.errors import Conflict, UsageError
from tenure.core.job import NewJob
from tenure.core.registry import open_queue
from tenure.sql import schema
from tenure.sql.operations import Dialect
from tenure.sql.schema import PostgresMigrations, SqliteMigrations, known, load_migrations, migrate
from tenure.store.postgres import Postgres
from tests.contract.adapters import Servers

JOB = NewJob(task="t", payload=b"{}")


@pytest.fixture
def further_migration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of tomorrow, with one more migration than this one."""

    def load(dialect: Dialect) -> list[tuple[int, str, str]]:
        ours = load_migrations(dialect)
        return [*ours, (len(ours) + 1, "further", "CREATE TABLE further (n integer);")]

    monkeypatch.setattr(schema, "load_migrations", load)


async def test_a_new_file_gets_its_tables_by_itself(tmp_path: Path) -> None:
    queue = open_queue(f"inbox+sqlite:///{tmp_path}/new.db")
    assert (await queue.submit([JOB]))[0].status == "created"
    await queue.close()
    assert await SqliteMigrations(tmp_path / "new.db").applied() == {
        number: checksum for number, _, checksum, _ in known("sqlite")
    }


async def test_a_file_with_other_tables_is_not_touched_until_asked(tmp_path: Path) -> None:
    path = tmp_path / "mine.db"
    with sqlite3.connect(path) as mine:
        mine.execute("CREATE TABLE notes (text TEXT)")
    url = f"inbox+sqlite:///{path}"
    queue = open_queue(url)
    with pytest.raises(UsageError, match="db migrate"):
        await queue.submit([JOB])
    await queue.close()
    done = await asyncio.to_thread(CliRunner().invoke, group, ["db", "migrate", "--queue", url])
    assert "0001_ledger" in done.output, done.output
    queue = open_queue(url)
    assert (await queue.submit([JOB]))[0].status == "created"
    await queue.close()
    with sqlite3.connect(path) as mine:
        assert mine.execute("SELECT count(*) FROM notes").fetchone() == (0,)


async def test_a_migration_that_was_changed_afterwards_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "changed.db"
    await migrate(SqliteMigrations(path), "sqlite")
    with sqlite3.connect(path) as file:
        file.execute("UPDATE tenure_migrations SET checksum = 'other'")
    with pytest.raises(Conflict, match="was changed"):
        await migrate(SqliteMigrations(path), "sqlite")
    queue = open_queue(f"inbox+sqlite:///{path}")
    with pytest.raises(Conflict, match="was changed"):
        await queue.submit([JOB])
    await queue.close()


async def test_a_file_of_an_earlier_version_is_refused_every_time_until_it_is_migrated(
    tmp_path: Path, further_migration: None
) -> None:
    path = tmp_path / "earlier.db"
    for step in known("sqlite")[:-1]:
        await SqliteMigrations(path).apply(*step)
    queue = open_queue(f"inbox+sqlite:///{path}")
    try:
        for _ in range(2):
            with pytest.raises(UsageError, match="db migrate"):
                await queue.submit([JOB])
        await migrate(SqliteMigrations(path), "sqlite")
        assert (await queue.submit([JOB]))[0].status == "created"
    finally:
        await queue.close()


async def test_a_database_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "later.db"
    await migrate(SqliteMigrations(path), "sqlite")
    with sqlite3.connect(path) as file:
        file.execute("INSERT INTO tenure_migrations (number, name, checksum) VALUES (99, 'x', 'y')")
    with pytest.raises(Conflict, match="later version"):
        await migrate(SqliteMigrations(path), "sqlite")


async def test_three_migrations_of_one_schema_at_once_are_one(servers: Servers) -> None:
    databases = [Postgres(servers.postgres(), schema="at_once") for _ in range(3)]
    done = await asyncio.gather(
        *(migrate(PostgresMigrations(database), "postgres") for database in databases)
    )
    assert max(map(len, done)) == len(known("postgres"))
    assert await migrate(PostgresMigrations(databases[0]), "postgres") == []
    await databases[0].script("DROP SCHEMA at_once CASCADE")
    for database in databases:
        await database.close()


async def test_a_schema_that_is_not_there_is_said_to_be_missing(servers: Servers) -> None:
    queue = open_queue(f"inbox+{servers.postgres()}?schema=nowhere")
    with pytest.raises(UsageError, match="db migrate"):
        await queue.submit([JOB])
    await queue.close()


async def test_three_programs_that_open_a_new_file_at_once_make_it_once(tmp_path: Path) -> None:
    migrations = [SqliteMigrations(tmp_path / "once.db") for _ in range(3)]
    await asyncio.gather(*(migrate(each, "sqlite") for each in migrations))
    assert len(await migrations[0].applied()) == len(known("sqlite"))


async def test_an_earlier_postgres_is_refused_until_it_is_migrated(
    servers: Servers, further_migration: None
) -> None:
    schema = f"earlier{secrets.token_hex(4)}"
    database = Postgres(servers.postgres(), schema=schema)
    queue = open_queue(f"inbox+{servers.postgres()}?schema={schema}")
    try:
        *earlier, (number, name, *_) = known("postgres")
        for step in earlier:
            await PostgresMigrations(database).apply(*step)
        further = f"{number:04d}_{name}"
        with pytest.raises(UsageError, match=rf"lacks {further}.*db migrate"):
            await queue.submit([JOB])
        assert await migrate(PostgresMigrations(database), "postgres") == [further]
        assert (await queue.submit([JOB]))[0].status == "created"
    finally:
        await queue.close()
        await database.script(f"DROP SCHEMA {schema} CASCADE")
        await database.close()


OLD = "CREATE TABLE ledger_migrations (number integer PRIMARY KEY, name text, checksum text)"


async def test_a_file_from_before_the_first_release_is_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with sqlite3.connect(path) as file:
        file.execute(OLD)
    with pytest.raises(Conflict, match=r"before the first release.* use a new SQLite file"):
        await migrate(SqliteMigrations(path), "sqlite")
    queue = open_queue(f"inbox+sqlite:///{path}")
    with pytest.raises(Conflict, match="before the first release"):
        await queue.submit([JOB])
    await queue.close()


async def test_a_schema_from_before_the_first_release_is_refused_with_advice(
    servers: Servers,
) -> None:
    schema = f"old{secrets.token_hex(4)}"
    database = Postgres(servers.postgres(), schema=schema)
    queue = open_queue(f"inbox+{servers.postgres()}?schema={schema}")
    try:
        await database.script(f"CREATE SCHEMA {schema}; {OLD}")
        with pytest.raises(Conflict, match=r"before the first release.*schema=NAME"):
            await migrate(PostgresMigrations(database), "postgres")
        with pytest.raises(Conflict, match="before the first release"):
            await queue.submit([JOB])
    finally:
        await queue.close()
        await database.script(f"DROP SCHEMA {schema} CASCADE")
        await database.close()
