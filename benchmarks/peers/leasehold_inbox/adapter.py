"""Leasehold's inbox on PostgreSQL."""

from __future__ import annotations

import os

from leasehold_kit import QueueProducer, main

from leasehold.ledger.migrating import PostgresMigrations, migrate
from leasehold.store.postgres import Postgres

SERVER = os.environ["BENCH_POSTGRES_URL"]
SYNCHRONOUS = "normal" if os.environ.get("BENCH_SYNCHRONOUS_COMMIT") == "off" else "full"
URL = f"inbox+{SERVER}?synchronous={SYNCHRONOUS}"


async def make() -> QueueProducer:
    database = Postgres(SERVER, schema="leasehold")
    await migrate(PostgresMigrations(database), "postgres")
    await database.close()
    return QueueProducer(
        URL,
        "asyncpg",
        notes="journal, attempt and fence for every job; an event where a webhook is named",
        chunk=2_000,
        ended=("succeeded", "dead_letter"),
    )


if __name__ == "__main__":
    main(URL, make, slots=400)
