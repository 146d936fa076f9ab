"""Stores a reader's journal position in an SQL ledger: the only thing that capture writes there."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from tenure.core.journal import SqlFormat
from tenure.sql import open_engine
from tenure.sql.sql_ledger import JournalReaders


def save_position(fmt: SqlFormat, reader: str, position: int | None) -> None:
    """Store a reader's position; None removes the reader."""
    # In a thread: the caller may run in an event loop, where `asyncio.run` is not allowed.
    with ThreadPoolExecutor(1, thread_name_prefix="tell") as apart:
        apart.submit(asyncio.run, _save_position(fmt, reader, position)).result()


async def _save_position(fmt: SqlFormat, reader: str, position: int | None) -> None:
    # The journal is read by Python's own SQLite client, whatever the URL says. Two clients in one
    # process release each other's locks.
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
