"""The `omniq` contract: OmniQ's queue in Redis, with groups, by its own client and by the seam."""

from __future__ import annotations

from tenure.contracts.omniq.client import Client, Paused, Reserved, SyncClient
from tenure.contracts.omniq.consume import JobContext
from tenure.contracts.omniq.ledger import OmniqJournal, OmniqLedger, stream_format
from tenure.contracts.omniq.options import NotActive, Options, Refused, TokenMismatch
from tenure.contracts.omniq.queue import OmniqQueue
from tenure.core.journal import StreamFormat
from tenure.core.registry import QueueUrl
from tenure.store.redis_queue import open_redis

__all__ = [
    "Client",
    "JobContext",
    "NotActive",
    "OmniqJournal",
    "OmniqLedger",
    "OmniqQueue",
    "Paused",
    "Refused",
    "Reserved",
    "SyncClient",
    "TokenMismatch",
]


_EXAMPLE = "omniq+redis://host:6379/0?queue=name"


def open_queue(url: QueueUrl, *, worker_id: str = "") -> OmniqQueue:
    """The queue behind `omniq+redis://host:port/db?queue=...`; connects on first use."""
    return OmniqQueue(*open_redis(url, Options, _EXAMPLE), worker_id=worker_id)


def open_ledger(url: QueueUrl) -> OmniqLedger:
    """The ledger of the same queue."""
    return OmniqLedger(*open_redis(url, Options, _EXAMPLE))


def open_journal(url: QueueUrl) -> OmniqJournal:
    """The journal of the same queue."""
    return OmniqJournal(*open_redis(url, Options, _EXAMPLE))


def journal_format(url: QueueUrl) -> StreamFormat:
    """Where the journal is and how its lines are written, for bulk readers."""
    options, store = url.read(Options)
    return stream_format(store, options)
