"""The `omniq` contract: OmniQ's queue in Redis, with groups; its own client, and the seam."""

from __future__ import annotations

from tenure.contracts.omniq.blocking import SyncClient
from tenure.contracts.omniq.client import Client
from tenure.contracts.omniq.context import JobContext
from tenure.contracts.omniq.errors import NotActive, Refused, TokenMismatch
from tenure.contracts.omniq.journal import OmniqJournal, tape
from tenure.contracts.omniq.ledger import OmniqLedger
from tenure.contracts.omniq.options import Options
from tenure.contracts.omniq.queue import OmniqQueue
from tenure.contracts.omniq.replies import Paused, Reserved
from tenure.core.errors import UsageError
from tenure.core.journal import StreamFormat
from tenure.core.registry import QueueUrl
from tenure.store.redis import Redis

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


def open_queue(url: QueueUrl, *, worker_id: str = "") -> OmniqQueue:
    """The queue behind `omniq+redis://host:port/db?queue=...`; connects on first use."""
    redis, options = _parts(url)
    return OmniqQueue(redis, options, worker_id=worker_id)


def open_ledger(url: QueueUrl) -> OmniqLedger:
    """The ledger of the same queue."""
    return OmniqLedger(*_parts(url))


def open_journal(url: QueueUrl) -> OmniqJournal:
    """The journal of the same queue."""
    return OmniqJournal(*_parts(url))


def journal_format(url: QueueUrl) -> StreamFormat:
    """How the journal is written, for readers in bulk."""
    options, store = url.read(Options)
    return tape(store, options)


def _parts(url: QueueUrl) -> tuple[Redis, Options]:
    if not url.store:
        raise UsageError(
            f"{url.safe} names no server; write omniq+redis://host:6379/0?queue=name",
            contract="omniq",
        )
    options, store = url.read(Options)
    return Redis(store, name="tenure"), options
