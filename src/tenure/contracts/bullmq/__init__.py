"""The `bullmq` contract: the queue of Node's BullMQ in Redis, with Python workers and producers."""

from __future__ import annotations

from tenure.contracts.bullmq.ledger import (
    BullmqJournal,
    BullmqLedger,
    Metrics,
    SchedulerRecord,
    stream_format,
)
from tenure.contracts.bullmq.options import URL_EXAMPLE, Options
from tenure.contracts.bullmq.producer import Flow, Producer, open_events, open_producer
from tenure.contracts.bullmq.queue import BullmqQueue
from tenure.contracts.bullmq.records import Children, Event, QueueEvents
from tenure.core.journal import StreamFormat
from tenure.core.registry import QueueUrl
from tenure.store.redis_queue import open_redis

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
    redis, options = open_redis(url, Options, URL_EXAMPLE)
    _, store = url.read(Options)
    return BullmqQueue(redis, options, worker_id=worker_id, url=store)


def open_ledger(url: QueueUrl) -> BullmqLedger:
    """The ledger of the same queue."""
    return BullmqLedger(*open_redis(url, Options, URL_EXAMPLE))


def open_journal(url: QueueUrl) -> BullmqJournal:
    """The journal of the same queue."""
    return BullmqJournal(*open_redis(url, Options, URL_EXAMPLE))


def journal_format(url: QueueUrl) -> StreamFormat:
    """How the journal is written, for readers in bulk."""
    options, store = url.read(Options)
    return stream_format(store, options)
