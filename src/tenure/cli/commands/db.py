"""`tenure db`: the schema of a queue that lives in a database."""

from __future__ import annotations

import asyncio

import click

from tenure.cli.config import load_config
from tenure.cli.migrating import migrated
from tenure.cli.options import json_option, queue_option
from tenure.cli.output import emit, emit_text, note
from tenure.core.errors import UsageError
from tenure.core.registry import parse_url


@click.group("db", short_help="Bring a database to the schema of this version.")
def command() -> None:
    """Look after the database of a queue.

    \b
    tenure db migrate --queue inbox+postgresql://user@host/database
    """


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
    done = asyncio.run(migrated(url))
    if as_json:
        emit({"applied": done})
        return
    for name in done:
        emit_text(name)
    note(f"{len(done)} applied" if done else "up to date")
