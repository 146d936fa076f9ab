"""Tenure's inbox on PostgreSQL."""

from __future__ import annotations

import asyncio
import os

import asyncpg
from tenure_kit import QueueProducer, main

from tenure.sql.schema import PostgresMigrations, migrate
from tenure.store.postgres import Postgres
from tenure.worker import Settings

SERVER = os.environ["BENCH_POSTGRES_URL"]
SYNCHRONOUS = "normal" if os.environ.get("BENCH_SYNCHRONOUS_COMMIT") == "off" else "full"
URL = f"inbox+{SERVER}?synchronous={SYNCHRONOUS}"
RECEIVER = os.environ.get("BENCH_RECEIVER", "http://receiver.example/")
EVENTS = {"status_webhook_url": RECEIVER} if "BENCH_EVENTS" in os.environ else {}
"""With an address each step of a job leaves an event in the outbox, in the same transaction."""

BEST = Settings(claim_batch_max=1_000, settle_batch_max=1_000)
"""As many as one statement takes: a commit waits for the disk, whatever is in it."""

LEFT = """SELECT (SELECT count(*) FROM inbox_jobs WHERE queue = 'inbox' AND ready)
  + (SELECT count(*) FROM inbox_jobs WHERE queue = 'inbox'
    AND status IN ('claimed', 'fetching', 'processing', 'uploading'))"""
"""What is not in the line and not leased is done: no job here waits for later."""


class Producer(QueueProducer):
    """Asks for what is left alone: the finished, which others do not keep, are many to count."""

    connection: asyncpg.Connection | None = None

    async def unfinished(self) -> int:
        if self.connection is None:
            settings = {"search_path": "tenure", "enable_seqscan": "off"}
            self.connection = await asyncpg.connect(SERVER, server_settings=settings)
        return int(await self.connection.fetchval(LEFT))


async def make() -> QueueProducer:
    database = Postgres(SERVER, schema="tenure")
    await migrate(PostgresMigrations(database), "postgres")
    await database.close()
    producer = Producer(
        URL,
        "asyncpg",
        notes="journal, attempt and fence for every job" + ("; two events too" if EVENTS else ""),
        chunk=100_000,
        ended=("succeeded", "dead_letter"),
        options=EVENTS,
    )
    # Connected, by as many connections as a bulk takes: what is timed is the work.
    await asyncio.gather(producer.queue.claim(1, wait_ms=0), producer.queue.upkeep())
    await producer.unfinished()
    return producer


if __name__ == "__main__":
    main(URL, make, slots=2_000, settings=BEST)
