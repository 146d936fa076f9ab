"""The `omniq` contract: OmniQ's queue in Redis, with groups; its own client, and the seam."""

from __future__ import annotations

from leasehold.contracts.omniq.blocking import SyncClient
from leasehold.contracts.omniq.client import Client
from leasehold.contracts.omniq.context import JobContext
from leasehold.contracts.omniq.errors import NotActive, Refused, TokenMismatch
from leasehold.contracts.omniq.journal import OmniqJournal, tape
from leasehold.contracts.omniq.ledger import OmniqLedger
from leasehold.contracts.omniq.options import Options
from leasehold.contracts.omniq.queue import OmniqQueue
from leasehold.contracts.omniq.replies import Paused, Reserved
from leasehold.core.errors import UsageError
from leasehold.core.opening import QueueUrl
from leasehold.core.tape import StreamTape
from leasehold.store.redis import Redis

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


def journal_tape(url: QueueUrl) -> StreamTape:
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
    return Redis(store, name="leasehold"), options
