"""The `streams` contract: a Redis Streams queue with a hash and an event stream per job."""

from __future__ import annotations

from tenure.contracts.streams.ledger import StreamsJournal, StreamsLedger, stream_format
from tenure.contracts.streams.options import Options
from tenure.contracts.streams.queue import StreamsQueue
from tenure.core.journal import StreamFormat
from tenure.core.registry import QueueUrl
from tenure.store.redis_queue import open_redis

__all__ = ["StreamsJournal", "StreamsLedger", "StreamsQueue"]

_EXAMPLE = "streams+redis://host:6379/0"


def open_queue(url: QueueUrl, *, worker_id: str = "") -> StreamsQueue:
    """The queue behind `streams+redis://host:port/db?lease_ms=...`; connects on first use."""
    return StreamsQueue(*open_redis(url, Options, _EXAMPLE), worker_id=worker_id)


def open_ledger(url: QueueUrl) -> StreamsLedger:
    """The ledger of the same queue."""
    return StreamsLedger(*open_redis(url, Options, _EXAMPLE))


def open_journal(url: QueueUrl) -> StreamsJournal:
    """The journal of the same queue."""
    return StreamsJournal(*open_redis(url, Options, _EXAMPLE))


def journal_format(url: QueueUrl) -> StreamFormat:
    """Where the journal is and how its lines are written, for bulk readers."""
    options, store = url.read(Options)
    return stream_format(store, options)
