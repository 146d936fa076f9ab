"""`leasehold db`: the schema of a queue that lives in a database."""

from __future__ import annotations

import asyncio

import click

from leasehold.cli.config import load_config
from leasehold.cli.options import json_option, queue_option
from leasehold.cli.output import emit, emit_text, note
from leasehold.core.errors import UsageError
from leasehold.core.opening import QueueUrl, parse_url


@click.group("db", short_help="Bring a database to the schema of this version.")
def command() -> None:
    """Look after the database of a queue."""


@command.command("migrate")
@queue_option
@json_option
def migrate(queue_url: str | None, as_json: bool) -> None:
    """Apply the migrations that the database lacks; nothing happens when it lacks none.

    Programs at work go on: migrations of one major version only add. Two of these commands at once
    are one after the other.
    """
    url = parse_url(load_config().text("queue_url", queue_url))
    if not url.store.startswith(("sqlite", "postgres", "libsql")):
        raise UsageError(f"{url.safe} has no database; name one with --queue inbox+sqlite:///...")
    done = asyncio.run(_migrated(url))
    if as_json:
        emit({"applied": done})
        return
    for name in done:
        emit_text(name)
    note(f"{len(done)} applied" if done else "up to date")


async def _migrated(url: QueueUrl) -> list[str]:
    from leasehold.ledger.migrating import migrate as bring

    if url.store.startswith("postgres"):
        from leasehold.ledger.migrating import PostgresMigrations
        from leasehold.store.postgres import Postgres

        database = Postgres(url.store, schema=url.options.get("schema", "leasehold"))
        try:
            return await bring(PostgresMigrations(database), "postgres")
        finally:
            await database.close()
    from leasehold.ledger.sqlite_migrations import SqliteMigrations
    from leasehold.store.sqlite import file_of

    return await bring(SqliteMigrations(file_of(url.store)), "sqlite")
