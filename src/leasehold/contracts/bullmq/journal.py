"""The history of the queue: the stream `<prefix>:<queue>:leasehold:journal`, beside BullMQ's keys.

Lines as `store.journal` reads them: parts in the order of `_FIELDS`; parts are only ever added at
the end.
"""

from __future__ import annotations

from leasehold.contracts.bullmq.options import CONTRACT, Options, keys
from leasehold.core.tape import StreamTape
from leasehold.store.journal import Lines, StreamJournal
from leasehold.store.redis import Redis

_FIELDS = (
    "job_id",
    "type",
    "ver",
    "ts_ms",
    "task",
    "from_state",
    "to_state",
    "attempt",
    "fence",
    "prev_fence",
    "lease_until_ms",
    "prev_lease_until_ms",
    "worker_id",
    "max_attempts",
    "due_ms",
    "error_code",
    "payload_h",
    "result_h",
    "token_h",
    "priority",
    "data",
)


class BullmqJournal(StreamJournal):
    """The journal of one queue of this contract."""

    def __init__(self, redis: Redis, options: Options) -> None:
        lines = Lines(_FIELDS, contract=CONTRACT, queue=options.queue)
        super().__init__(redis, keys(options.key_prefix)[15], lines)


def tape(store: str, options: Options) -> StreamTape:
    """The same stream for readers in bulk; it is trimmed only behind what they captured."""
    key = keys(options.key_prefix)[15]
    return StreamTape(
        store=store,
        key=key,
        contract=CONTRACT,
        queue=options.queue,
        fields=_FIELDS,
        captured=(keys(options.key_prefix)[5], "leasehold.captured"),
    )
