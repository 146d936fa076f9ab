"""Migrations: applied once, in order, checked at the start, refused when they do not fit."""

import asyncio
import re
import secrets
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner

from tenure.cli.console import group
from tenure.core.errors import Conflict, LeaseLost, UsageError
from tenure.core.job import NewJob
from tenure.core.lease import Report
from tenure.core.outcome import Outcome
from tenure.core.registry import open_queue
from tenure.core.seam import Queue
from tenure.sql import schema
from tenure.sql.operations import Dialect
from tenure.sql.schema import (
    PostgresMigrations,
    SqliteMigrations,
    known,
    load_migrations,
    migrate,
    migration_script,
)
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
        number: (checksum, name) for number, name, checksum, _ in known("sqlite")
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


async def test_a_later_schema_that_needs_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "later.db"
    await migrate(SqliteMigrations(path), "sqlite")
    last = max(number for number, *_ in known("sqlite"))
    note = "INSERT INTO tenure_migrations (number, name, checksum) VALUES (?, ?, 'y')"
    with sqlite3.connect(path) as file:
        file.execute(note, (98, f"no_stages_needs_{last:04d}"))
    assert await migrate(SqliteMigrations(path), "sqlite") == []
    with sqlite3.connect(path) as file:
        file.execute(note, (99, f"no_steps_needs_{last + 1:04d}"))
    with pytest.raises(Conflict, match=rf"0099_no_steps.*migration {last + 1:04d}.*upgrade it"):
        await migrate(SqliteMigrations(path), "sqlite")
    queue = open_queue(f"inbox+sqlite:///{path}")
    with pytest.raises(Conflict, match="upgrade it"):
        await queue.submit([JOB])
    await queue.close()


async def goes_through(queue: Queue) -> None:
    """Submit, one by one and many, claim, extend, report, settle, retry, upkeep."""
    await queue.submit([JOB])
    await queue.submit([JOB] * 600)
    leases = await queue.claim(20, wait_ms=10_000)
    await queue.extend(leases)
    await queue.report([Report(lease=leases[0], step="half")])
    outcomes = [Outcome(lease, "complete", result=b"1") for lease in leases[:10]]
    outcomes += [Outcome(lease, "release") for lease in leases[10:]]
    assert not any(isinstance(each, LeaseLost) for each in await queue.settle(outcomes))
    await queue.upkeep()


# What a later version may do in a migration that earlier ones live with.
LATER = """
ALTER TABLE inbox_jobs ADD COLUMN shard integer NOT NULL DEFAULT 0;
ALTER TABLE job_journal ADD COLUMN shard integer;
ALTER TABLE job_attempts ADD COLUMN shard integer;
ALTER TABLE idempotency_keys ADD COLUMN shard integer;
CREATE TABLE later (n integer);
CREATE INDEX inbox_jobs_later ON inbox_jobs (shard);
"""


@pytest.mark.parametrize("engine", ["sqlite", "postgres", "pgbouncer"])
async def test_a_later_schema_serves_workers_of_the_version_before(
    servers: Servers, tmp_path: Path, engine: str
) -> None:
    """One that runs while the schema changes, and one that starts afterwards."""
    database = None
    if engine == "sqlite":
        url, migrations = f"inbox+sqlite:///{tmp_path}/x.db", SqliteMigrations(tmp_path / "x.db")
    else:
        server = servers.postgres_itself()
        if engine == "pgbouncer":
            server = servers.pgbouncer("transaction").url
        name = f"later{secrets.token_hex(4)}"
        url, database = f"inbox+{server}?schema={name}", Postgres(server, schema=name)
        migrations = PostgresMigrations(database)
    dialect: Dialect = "sqlite" if engine == "sqlite" else "postgres"
    await migrate(migrations, dialect)
    runs = open_queue(url, worker_id="runs")
    await goes_through(runs)
    await migrations.apply(len(known(dialect)) + 1, "later", "made-up", LATER)
    await goes_through(runs)
    starts = open_queue(url, worker_id="starts")
    await goes_through(starts)
    assert await migrate(migrations, dialect) == []
    for each in (runs, starts):
        await each.close()
    if database is not None:
        await database.script(f"DROP SCHEMA {database.schema} CASCADE")
        await database.close()


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_a_migration_that_takes_something_away_says_which_version_can_do_without(
    dialect: Dialect,
) -> None:
    takes = re.compile(r"\b(DROP|RENAME)\b")
    for number, name, text in load_migrations(dialect)[1:]:
        assert not takes.search(text) or re.search(r"_needs_\d{4}$", name), f"{number} {name}"


async def test_what_would_be_run_on_a_file_is_what_is_run(tmp_path: Path) -> None:
    path = tmp_path / "script.db"
    script = await migration_script(SqliteMigrations(path), "sqlite")
    with sqlite3.connect(path, isolation_level=None) as file:
        file.executescript(script)
    assert await migrate(SqliteMigrations(path), "sqlite") == []
    assert await migration_script(SqliteMigrations(path), "sqlite") == ""
    queue = open_queue(f"inbox+sqlite:///{path}")
    await goes_through(queue)
    await queue.close()


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
