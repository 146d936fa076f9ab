"""Migrations: applied once, in order, checked at the start, refused when they do not fit."""

import asyncio
import secrets
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner

from tenure.cli.group import group
from tenure.core.errors import Conflict, ServerError, UsageError
from tenure.core.job import NewJob
from tenure.core.outcome import Outcome
from tenure.core.registry import open_ledger, open_queue
from tenure.core.seam import Query
from tenure.ledger.migrating import PostgresMigrations, known, migrate
from tenure.ledger.sqlite_migrations import SqliteMigrations
from tenure.store.postgres import Postgres
from tests.contract.adapters import Servers

JOB = NewJob(task="t", payload=b"{}")


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
        file.execute("UPDATE ledger_migrations SET checksum = 'other'")
    with pytest.raises(Conflict, match="was changed"):
        await migrate(SqliteMigrations(path), "sqlite")
    queue = open_queue(f"inbox+sqlite:///{path}")
    with pytest.raises(Conflict, match="was changed"):
        await queue.submit([JOB])
    await queue.close()


async def test_a_file_of_an_earlier_version_is_refused_every_time_until_it_is_migrated(
    tmp_path: Path,
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


async def test_attempts_of_an_earlier_version_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "earlier.db"
    migrations = SqliteMigrations(path)
    for step in known("sqlite")[:2]:
        await migrations.apply(*step)
    with sqlite3.connect(path) as file:
        file.execute(
            "INSERT INTO job_attempts VALUES ('j', 1, 'q', 1, 'w', 2, 3, 'lost', '', '', '', 0)"
        )
        file.execute("INSERT INTO pruned_jobs VALUES ('old', 'q', 'r', 4)")
    await migrate(migrations, "sqlite")
    with sqlite3.connect(path) as file:
        attempts = file.execute("SELECT job_id, queue, verdict FROM job_attempts").fetchall()
        pruned = file.execute("SELECT job_id, queue, pruned_ms FROM pruned_jobs").fetchall()
    assert (attempts, pruned) == ([("j", "q", "lost")], [("old", "q", 4)])


async def test_events_of_an_earlier_version_are_listed_beside_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    migrations = SqliteMigrations(path)
    for step in known("sqlite")[:5]:
        await migrations.apply(*step)
    with sqlite3.connect(path) as file:
        file.execute(
            "INSERT INTO inbox_jobs (job_id, queue, task, max_attempts, created_ms, updated_ms,"
            " status_webhook_url, payload) VALUES ('j', 'inbox', 't', 1, 1, 1, 'https://x', '{}')"
        )
        file.execute(
            "UPDATE inbox_jobs SET status = 'claimed', claim_version = 1, ready = 0,"
            " lease_token_h = 'h', lease_expires_at = 9e15"
        )
    await migrate(migrations, "sqlite")
    with sqlite3.connect(path) as file:
        file.execute("UPDATE inbox_jobs SET status = 'failed', lease_expires_at = 0")
    queue = open_queue(f"inbox+sqlite:///{path}")
    await queue.upkeep()
    await queue.close()
    outbox = open_ledger(f"inbox+sqlite:///{path}?box=outbox")
    page = await outbox.find(Query())
    await outbox.close()
    assert [event.job_id for event in page.jobs] == ["j.3", "j.2", "j.1"]


async def test_a_database_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "later.db"
    await migrate(SqliteMigrations(path), "sqlite")
    with sqlite3.connect(path) as file:
        file.execute("INSERT INTO ledger_migrations (number, name, checksum) VALUES (99, 'x', 'y')")
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


async def test_a_job_of_an_earlier_postgres_goes_on_under_the_new_rules(servers: Servers) -> None:
    schema = f"earlier{secrets.token_hex(4)}"
    database = Postgres(servers.postgres(), schema=schema)
    try:
        for step in known("postgres")[:8]:
            await PostgresMigrations(database).apply(*step)
        await database.script(
            "INSERT INTO inbox_jobs (job_id, queue, task, max_attempts, created_ms, updated_ms,"
            " payload, status_webhook_url) VALUES ('old', 'inbox', 't', 3, 1, 1, '{}', 'https://x')"
        )
        assert "0009_lighter_steps" in await migrate(PostgresMigrations(database), "postgres")
        queue = open_queue(f"inbox+{servers.postgres()}?schema={schema}", worker_id="w")
        (lease,) = await queue.claim(1, wait_ms=0)
        await queue.settle([Outcome(lease, "complete")])
        await queue.close()
        with pytest.raises(ServerError, match="no step from succeeded"):
            await database.script("UPDATE inbox_jobs SET status = 'queued'")
        rows = await database.fetch("SELECT job_id FROM job_outbox_events ORDER BY seq", [])
        assert [row["job_id"] for row in rows] == ["old.1", "old.2"]
    finally:
        await database.script(f"DROP SCHEMA {schema} CASCADE")
        await database.close()


async def test_jobs_and_events_of_an_earlier_postgres_keep_their_order_and_history(
    servers: Servers,
) -> None:
    """What was listed by job stays listed; what is told by the job's row is not told twice."""
    schema = f"earlier{secrets.token_hex(4)}"
    database = Postgres(servers.postgres(), schema=schema)
    try:
        for step in known("postgres")[:10]:
            await PostgresMigrations(database).apply(*step)
        await database.script(
            "INSERT INTO inbox_jobs (job_id, queue, task, max_attempts, created_ms, updated_ms,"
            " payload, status_webhook_url) VALUES ('old', 'inbox', 't', 3, 1, 1, '{}', 'https://x');"
            "INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, to_state)"
            " VALUES ('inbox', 'old', 1, 'submit', 1, 't', 'queued');"
            "UPDATE inbox_jobs SET status = 'claimed', claim_version = 1, ready = false,"
            " lease_token_h = 'h', lease_expires_at = 2, ver = 2;"
            "INSERT INTO job_journal (queue, job_id, ver, type, ts_ms, task, to_state)"
            " VALUES ('inbox', 'old', 2, 'claim', 2, 't', 'claimed')"
        )
        first, *_ = await migrate(PostgresMigrations(database), "postgres")
        assert first == "0011_fewer_entries"
        url = f"inbox+{servers.postgres()}?schema={schema}"
        queue, outbox = open_queue(url, worker_id="w"), open_queue(f"{url}&box=outbox")
        (lease,) = await queue.claim(1, wait_ms=0)  # the lease of the earlier claim ran out
        await queue.settle([Outcome(lease, "complete")])
        ledger = open_ledger(url)
        told = [(event.event_id, event.type) for event in await ledger.events("old")]
        assert told == [
            *(("1", "queued"), ("2", "claimed"), ("3", "queued"), ("4", "claimed")),
            ("5", "succeeded"),
        ]
        for number in (1, 2, 3, 4):
            leases = await outbox.claim(10, wait_ms=0)
            assert [lease.job_id for lease in leases] == [f"old.{number}"]
            await outbox.settle([Outcome(lease, "complete") for lease in leases])
        for opened in (queue, outbox, ledger):
            await opened.close()
    finally:
        await database.script(f"DROP SCHEMA {schema} CASCADE")
        await database.close()


FAR = (
    "INSERT INTO inbox_jobs (job_id, queue, task, max_attempts, created_ms, updated_ms, payload,"
    " ver, expires_ms) VALUES"
    " ('far', 'inbox', 't', 3, 1, 1, '{}', 9223372036854775807, 9223372036854775807),"
    " ('good', 'inbox', 't', 3, 1, 1, '{}', 1, 0)"
)


async def test_jobs_of_an_earlier_file_with_numbers_beyond_the_bounds_are_claimed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "far.db"
    migrations = SqliteMigrations(path)
    for step in known("sqlite"):
        if step[1] != "numbers_within_bounds":
            await migrations.apply(*step)
    with sqlite3.connect(path) as file:
        file.execute(FAR)
    await migrate(migrations, "sqlite")
    queue = open_queue(f"inbox+sqlite:///{path}")
    assert len(await queue.claim(5, wait_ms=0)) == 2
    await queue.close()


async def test_jobs_of_an_earlier_postgres_with_numbers_beyond_the_bounds_are_claimed(
    servers: Servers,
) -> None:
    schema = f"earlier{secrets.token_hex(4)}"
    database = Postgres(servers.postgres(), schema=schema)
    try:
        for step in known("postgres"):
            if step[1] != "numbers_within_bounds":
                await PostgresMigrations(database).apply(*step)
        await database.script(FAR)
        await migrate(PostgresMigrations(database), "postgres")
        queue = open_queue(f"inbox+{servers.postgres()}?schema={schema}")
        assert len(await queue.claim(5, wait_ms=0)) == 2
        await queue.close()
    finally:
        await database.script(f"DROP SCHEMA {schema} CASCADE")
        await database.close()
