"""The `streams` contract: a Redis Streams queue with a hash and an event stream per job."""

from __future__ import annotations

from tenure.contracts.streams.journal import StreamsJournal, tape
from tenure.contracts.streams.ledger import StreamsLedger
from tenure.contracts.streams.options import Options
from tenure.contracts.streams.queue import StreamsQueue
from tenure.core.errors import UsageError
from tenure.core.journal import StreamFormat
from tenure.core.registry import QueueUrl
from tenure.store.redis import Redis

__all__ = ["StreamsJournal", "StreamsLedger", "StreamsQueue"]


def open_queue(url: QueueUrl, *, worker_id: str = "") -> StreamsQueue:
    """The queue behind `streams+redis://host:port/db?lease_ms=...`; connects on first use."""
    redis, options = _parts(url)
    return StreamsQueue(redis, options, worker_id=worker_id)


def open_ledger(url: QueueUrl) -> StreamsLedger:
    """The ledger of the same queue."""
    return StreamsLedger(*_parts(url))


def open_journal(url: QueueUrl) -> StreamsJournal:
    """The journal of the same queue."""
    return StreamsJournal(*_parts(url))


def journal_format(url: QueueUrl) -> StreamFormat:
    """How the journal is written, for readers in bulk."""
    options, store = url.read(Options)
    return tape(store, options)


def _parts(url: QueueUrl) -> tuple[Redis, Options]:
    if not url.store:
        raise UsageError(
            f"{url.safe} names no server; write streams+redis://host:6379/0", contract="streams"
        )
    options, store = url.read(Options)
    return Redis(store, name="tenure"), options
