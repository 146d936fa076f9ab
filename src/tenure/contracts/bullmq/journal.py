"""The history of the queue: the stream `<prefix>:<queue>:tenure:journal`, beside BullMQ's keys.

Lines as `store.journal` reads them: parts in the order of `_FIELDS`; parts are only ever added at
the end.
"""

from __future__ import annotations

from tenure.contracts.bullmq.options import CONTRACT, Options, keys
from tenure.core.journal import StreamFormat
from tenure.store.journal import HEAD, Lines, StreamJournal
from tenure.store.redis import Redis

_FIELDS = (
    *HEAD,
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
        super().__init__(redis, keys(options.key_prefix).journal, lines)


def tape(store: str, options: Options) -> StreamFormat:
    """The same stream for readers in bulk; it is trimmed only behind what they captured."""
    key = keys(options.key_prefix).journal
    return StreamFormat(
        store=store,
        key=key,
        contract=CONTRACT,
        queue=options.queue,
        fields=_FIELDS,
        captured=(keys(options.key_prefix).meta, "tenure.captured"),
    )
