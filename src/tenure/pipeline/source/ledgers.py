"""Telling an SQL ledger how far its history is kept elsewhere: all that capture writes there."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from tenure.core.journal import SqlFormat
from tenure.sql import open_engine
from tenure.sql.sql_ledger import JournalReaders


def save_position(fmt: SqlFormat, reader: str, position: int | None) -> None:
    """Note a reader's position; None forgets the reader."""
    # Whoever captures may be in a loop of its own, in which no other may run.
    with ThreadPoolExecutor(1, thread_name_prefix="tell") as apart:
        apart.submit(asyncio.run, _save_position(fmt, reader, position)).result()


async def _save_position(fmt: SqlFormat, reader: str, position: int | None) -> None:
    # The reel reads by SQLite's own client, whatever the URL says: two in a process undo each
    # other's locks.
    store = fmt.store.replace("libsql:", "sqlite:", 1)
    postgres = store.startswith("postgres")
    engine = open_engine(store, {"schema": fmt.schema} if postgres else {})
    readers = JournalReaders(engine, fmt.queues)
    try:
        if position is None:
            await readers.forget(reader)
        else:
            await readers.note(reader, position)
    finally:
        await engine.close()
