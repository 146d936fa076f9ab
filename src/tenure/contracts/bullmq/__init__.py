"""The `bullmq` contract: the queue of Node's BullMQ in Redis, worked and fed from Python."""

from __future__ import annotations

from tenure.contracts.bullmq.journal import BullmqJournal, BullmqNews, tape
from tenure.contracts.bullmq.ledger import BullmqLedger, Metrics, SchedulerRecord
from tenure.contracts.bullmq.options import Options
from tenure.contracts.bullmq.producer import Flow, Producer, open_events, open_producer
from tenure.contracts.bullmq.queue import BullmqQueue
from tenure.contracts.bullmq.records import Children, Event, QueueEvents
from tenure.core.errors import UsageError
from tenure.core.journal import StreamFormat
from tenure.core.registry import QueueUrl
from tenure.store.redis import Redis

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
    return BullmqQueue(Redis(store, name="tenure"), options, worker_id=worker_id, url=store)


def open_ledger(url: QueueUrl) -> BullmqLedger:
    """The ledger of the same queue."""
    options, store = _parts(url)
    return BullmqLedger(Redis(store, name="tenure"), options)


def open_journal(url: QueueUrl) -> BullmqJournal:
    """The journal of the same queue."""
    options, store = _parts(url)
    return BullmqJournal(Redis(store, name="tenure"), options)


def open_news(url: QueueUrl) -> BullmqNews:
    """What names the jobs that move, for those who follow them."""
    options, store = _parts(url)
    return BullmqNews(Redis(store, name="tenure"), options)


def journal_tape(url: QueueUrl) -> StreamFormat:
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
