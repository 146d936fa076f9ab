"""The `bullmq` contract: the queue of Node's BullMQ in Redis, worked and fed from Python."""

from __future__ import annotations

from leasehold.contracts.bullmq.events import Event, QueueEvents
from leasehold.contracts.bullmq.family import Children, Flow
from leasehold.contracts.bullmq.journal import BullmqJournal, tape
from leasehold.contracts.bullmq.ledger import BullmqLedger
from leasehold.contracts.bullmq.managing import Metrics, SchedulerRecord
from leasehold.contracts.bullmq.options import Options
from leasehold.contracts.bullmq.producer import Producer, open_events, open_producer
from leasehold.contracts.bullmq.queue import BullmqQueue
from leasehold.core.errors import UsageError
from leasehold.core.opening import QueueUrl
from leasehold.core.tape import StreamTape
from leasehold.store.redis import Redis

__all__ = [
    "BullmqJournal",
    "BullmqLedger",
    "BullmqQueue",
    "Children",
    "Event",
    "Flow",
    "Metrics",
    "Producer",
    "QueueEvents",
    "SchedulerRecord",
    "open_events",
    "open_producer",
]


def open_queue(url: QueueUrl, *, worker_id: str = "") -> BullmqQueue:
    """The queue behind `bullmq+redis://host:port/db?queue=...`; connects on first use."""
    options, store = _parts(url)
    return BullmqQueue(Redis(store, name="leasehold"), options, worker_id=worker_id, url=store)


def open_ledger(url: QueueUrl) -> BullmqLedger:
    """The ledger of the same queue."""
    options, store = _parts(url)
    return BullmqLedger(Redis(store, name="leasehold"), options)


def open_journal(url: QueueUrl) -> BullmqJournal:
    """The journal of the same queue."""
    options, store = _parts(url)
    return BullmqJournal(Redis(store, name="leasehold"), options)


def journal_tape(url: QueueUrl) -> StreamTape:
    """How the journal is written, for readers in bulk."""
    options, store = _parts(url)
    return tape(store, options)


def _parts(url: QueueUrl) -> tuple[Options, str]:
    if not url.store:
        raise UsageError(
            f"{url.safe} names no server; write bullmq+redis://host:6379/0?queue=name",
            contract="bullmq",
        )
    return url.read(Options)
