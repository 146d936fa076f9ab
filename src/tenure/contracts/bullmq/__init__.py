"""The `bullmq` contract: the queue of Node's BullMQ in Redis, with Python workers and producers.

Here are its descriptor and the names of its client, which are imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tenure.core.registry import Contract, QueueUrl
from tenure.core.state import Machine

if TYPE_CHECKING:
    from tenure.contracts.bullmq.ledger import BullmqJournal as BullmqJournal
    from tenure.contracts.bullmq.ledger import BullmqLedger as BullmqLedger
    from tenure.contracts.bullmq.ledger import Metrics as Metrics
    from tenure.contracts.bullmq.ledger import SchedulerRecord as SchedulerRecord
    from tenure.contracts.bullmq.options import Options
    from tenure.contracts.bullmq.producer import Flow as Flow
    from tenure.contracts.bullmq.producer import Producer as Producer
    from tenure.contracts.bullmq.producer import open_events as open_events
    from tenure.contracts.bullmq.producer import open_producer as open_producer
    from tenure.contracts.bullmq.queue import BullmqQueue as BullmqQueue
    from tenure.contracts.bullmq.records import Event as Event
    from tenure.contracts.bullmq.records import QueueEvents as QueueEvents
    from tenure.contracts.bullmq.records import QueueNews
    from tenure.core.job import Children as Children
    from tenure.core.journal import StreamFormat
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

_MODULE_OF = {
    "BullmqJournal": "ledger",
    "BullmqLedger": "ledger",
    "BullmqQueue": "queue",
    "Children": "records",
    "Event": "records",
    "Flow": "producer",
    "Metrics": "ledger",
    "Producer": "producer",
    "QueueEvents": "records",
    "SchedulerRecord": "ledger",
    "open_events": "producer",
    "open_producer": "producer",
}
_EXAMPLE = "bullmq+redis://host:6379/0?queue=name"

MACHINE = Machine(
    contract="bullmq",
    initial=("waiting", "prioritized", "delayed", "waiting-children"),
    running=("active",),
    final=("completed", "failed"),
    steps={
        "waiting": ("active", "delayed", "prioritized", "failed"),
        "prioritized": ("active", "delayed", "waiting", "failed"),
        "delayed": ("waiting", "prioritized", "active", "failed"),
        "waiting-children": ("waiting", "prioritized", "delayed", "failed"),
        "active": (
            "completed",
            "failed",
            "waiting",
            "prioritized",
            "delayed",
            "waiting-children",
        ),
    },
    reopen={"completed": ("waiting", "prioritized"), "failed": ("waiting", "prioritized")},
)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def _redis(url: QueueUrl) -> tuple[Redis, Options]:
    from tenure.contracts.bullmq.options import Options
    from tenure.store.redis_queue import open_redis

    return open_redis(url, Options, _EXAMPLE)


def _open_queue(url: QueueUrl, worker_id: str) -> BullmqQueue:
    from tenure.contracts.bullmq.queue import BullmqQueue

    return BullmqQueue(*_redis(url), worker_id=worker_id, url=_read_options(url)[1])


def _open_ledger(url: QueueUrl) -> BullmqLedger:
    from tenure.contracts.bullmq.ledger import BullmqLedger

    return BullmqLedger(*_redis(url))


def _open_journal(url: QueueUrl) -> BullmqJournal:
    from tenure.contracts.bullmq.ledger import BullmqJournal

    return BullmqJournal(*_redis(url))


def _open_news(url: QueueUrl) -> QueueNews:
    from tenure.contracts.bullmq.records import QueueNews

    return QueueNews(*_redis(url))


def _read_options(url: QueueUrl) -> tuple[Options, str]:
    from tenure.contracts.bullmq.options import Options

    return url.read(Options)


def _journal_format(url: QueueUrl) -> StreamFormat:
    from tenure.contracts.bullmq.ledger import stream_format

    options, store = _read_options(url)
    return stream_format(store, options)


def _samples() -> Sequence[Any]:
    from tenure.contracts.bullmq.samples import FLOWS

    return FLOWS


CONTRACT = Contract(
    machine=MACHINE,
    open_queue=_open_queue,
    open_ledger=_open_ledger,
    open_journal=_open_journal,
    read_options=_read_options,
    example_url=_EXAMPLE,
    journal_format=_journal_format,
    parts={"news": _open_news},
    samples=_samples,
    submit_example=(
        "Node, with the bullmq package",
        """\
import {{ Queue }} from 'bullmq'
const queue = new Queue('{short}', {{ connection: {{ url: '{store}' }} }})
await queue.add({task}, {payload})
await queue.close()""",
    ),
    kinds={"paused": "waiting", "added": "waiting", "stalled": "waiting"},
    lost_max_option="stalled_max",
    foreign_writers=True,
    is_timed=True,
    submit_options=frozenset({"priority", "unique"}),
    unique_option=lambda word: {"deduplication": {"id": word}},
)
