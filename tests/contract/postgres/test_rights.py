"""A schema and a role made by a database administrator, and errors that name the missing right."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from urllib.parse import urlsplit

import asyncpg
import pytest
from click.testing import CliRunner

from tenure.cli.console import group
from tenure.cli.project import migrated, migration_script
from tenure.core.errors import ServerError, UsageError
from tenure.core.job import NewJob
from tenure.core.outcome import Outcome
from tenure.core.registry import open_ledger, open_queue, parse_url
from tests.contract.adapters import Servers
from tests.contract.cli.pages import page

PAGE = "docs/operating/postgresql.md"
JOB = NewJob(task="t", payload=b"{}")


@dataclass
class Administered:
    """A database of its own, an administrator, and a role that may do nothing yet."""

    admin: asyncpg.Connection  # type: ignore[type-arg]
    owner_url: str
    role: str
    role_url: str
    schema: str = "tenure"

    async def run(self, text: str) -> None:
        await self.admin.execute(text)


@pytest.fixture
async def database(servers: Servers) -> AsyncGenerator[Administered]:
    name = role = f"dba{secrets.token_hex(4)}"
    server = urlsplit(servers.postgres_itself())
    first = await asyncpg.connect(servers.postgres_itself())
    await first.execute(f"CREATE DATABASE {name}")
    await first.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'made-up'")
    owner = server._replace(path=f"/{name}")
    user = owner._replace(netloc=f"{role}:made-up@{server.hostname}:{server.port}")
    admin = await asyncpg.connect(owner.geturl())
    yield Administered(admin, f"inbox+{owner.geturl()}", role, f"inbox+{user.geturl()}")
    await admin.close()
    await first.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await first.execute(f"DROP ROLE {role}")
    await first.close()


async def works(url: str) -> None:
    """Submit one by one and by COPY, claim, settle, count."""
    queue, ledger = open_queue(url, worker_id="w"), open_ledger(url)
    try:
        await queue.submit([JOB])
        await queue.submit([JOB] * 600)
        leases = await queue.claim(10, wait_ms=5_000)
        await queue.settle([Outcome(lease, "complete") for lease in leases])
        await queue.upkeep()
        assert sum((await ledger.counts()).states.values()) == 601
    finally:
        await queue.close()
        await ledger.close()


async def test_a_role_that_may_create_no_schema_is_told_which_statement_helps(
    database: Administered,
) -> None:
    with pytest.raises(UsageError) as refused:
        await migrated(parse_url(database.role_url))
    advice = f"CREATE SCHEMA tenure AUTHORIZATION {database.role}"
    assert advice in str(refused.value)
    await database.run(advice)
    assert await migrated(parse_url(database.role_url))
    await works(database.role_url)


async def test_a_role_that_may_not_create_tables_is_told_which_grant_helps(
    database: Administered,
) -> None:
    await database.run("CREATE SCHEMA tenure")
    with pytest.raises(UsageError) as refused:
        await migrated(parse_url(database.role_url))
    advice = f"GRANT USAGE, CREATE ON SCHEMA tenure TO {database.role}"
    assert advice in str(refused.value)
    await database.run(advice)
    assert await migrated(parse_url(database.role_url))
    await works(database.role_url)


@pytest.mark.runs("docs/operating/postgresql.md:sql")
async def test_a_role_with_the_rights_of_the_page_serves_a_schema_that_it_does_not_own(
    database: Administered,
) -> None:
    """The administrator runs what `--sql` prints and the grants of the page, nothing else."""
    script = await migration_script(parse_url(database.owner_url))
    await database.run(script)
    (grants,) = [block.text for block in page(PAGE).blocks if block.language == "sql"]
    await database.run(grants.replace("worker", database.role))
    await works(database.role_url)
    assert await migrated(parse_url(database.role_url)) == []


async def test_a_missing_right_on_schema_or_table_is_named(database: Administered) -> None:
    await migrated(parse_url(database.owner_url))
    queue = open_queue(database.role_url)
    with pytest.raises(UsageError, match=f"GRANT USAGE ON SCHEMA tenure TO {database.role}"):
        await queue.submit([JOB])
    await database.run(
        f"GRANT USAGE ON SCHEMA tenure TO {database.role};"
        f"GRANT SELECT ON ALL TABLES IN SCHEMA tenure TO {database.role};"
    )
    with pytest.raises(ServerError, match=r"permission denied .* needs USAGE on the schema"):
        await queue.submit([JOB])
    await queue.close()


async def test_the_script_of_a_migration_does_what_the_command_does(
    database: Administered,
) -> None:
    """Printed by the command, run by another client; then nothing is missing. Nothing is changed by
    printing."""
    command = ["db", "migrate", "--sql", "--queue", database.owner_url]
    first, again = [await asyncio.to_thread(CliRunner().invoke, group, command) for _ in "ab"]
    assert first.exit_code == 0, first.output
    assert first.output == again.output
    assert re.search(r"^-- 0001_ledger$", first.output, re.MULTILINE)
    await database.run(first.output)
    assert await migrated(parse_url(database.owner_url)) == []
    after = await asyncio.to_thread(CliRunner().invoke, group, command)
    assert after.output.strip() == "-- up to date"
    await works(database.owner_url)
