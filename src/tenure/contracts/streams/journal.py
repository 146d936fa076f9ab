"""The history of the queue: the stream `jobs:journal`, written by the scripts.

Lines as `store.journal` reads them: parts in the order of `_FIELDS`, cut off after the last that
applies.
"""

from __future__ import annotations

from tenure.contracts.streams.options import CONTRACT, QUEUE, Options, keys
from tenure.core.journal import StreamFormat
from tenure.store.journal import HEAD, Lines, StreamJournal
from tenure.store.redis import Redis

_FIELDS = (
    *HEAD,
    "result_h",
    "payload_h",
    "error_code",
    "due_ms",
    "data",
)
_LINES = Lines(_FIELDS, contract=CONTRACT, queue=QUEUE)


class StreamsJournal(StreamJournal):
    """The journal of this contract."""

    def __init__(self, redis: Redis, options: Options) -> None:
        super().__init__(redis, keys(options.namespace)[1], _LINES)


def tape(store: str, options: Options) -> StreamFormat:
    """The same stream for readers in bulk; it is trimmed only behind what they captured."""
    all_keys = keys(options.namespace)
    return StreamFormat(
        store=store,
        key=all_keys[1],
        contract=CONTRACT,
        queue=QUEUE,
        fields=_FIELDS,
        captured=(all_keys[4], "captured"),
    )
