"""Brings the database behind a queue URL to the schema of this version."""

from __future__ import annotations

from tenure.core.registry import QueueUrl, open_part


async def migrated(url: QueueUrl) -> list[str]:
    """The names of the migrations that were applied; [] when it lacked none."""
    from tenure.ledger.migrating import migrate

    if url.store.startswith("postgres"):
        from tenure.ledger.migrating import PostgresMigrations

        engine = open_part(url.text, "database")
        try:
            return await migrate(PostgresMigrations(engine.database), "postgres")
        finally:
            await engine.close()
    from tenure.ledger.sqlite_migrations import SqliteMigrations
    from tenure.store.sqlite import file_of

    return await migrate(SqliteMigrations(file_of(url.store)), "sqlite")
