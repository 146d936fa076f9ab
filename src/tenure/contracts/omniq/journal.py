"""The history of a queue: the stream `{queue}:journal`, written by our scripts.

Lines as `store.journal` reads them: parts in the order of `_FIELDS`, cut off after the last that
applies. OmniQ's jobs have no task of their own: a line without one is of the queue's task. What
other OmniQ clients do is not in it; the next step that we make says what it found.
"""

from __future__ import annotations

from tenure.contracts.omniq.options import CONTRACT, Options, queue_base
from tenure.core.journal import StreamFormat
from tenure.store.journal import HEAD, Lines, StreamJournal
from tenure.store.redis import Redis

_FIELDS = (
    *HEAD,
    "gid",
    "result_h",
    "payload_h",
    "error_code",
    "due_ms",
    "data",
)


class OmniqJournal(StreamJournal):
    """The journal of one queue of this contract."""

    def __init__(self, redis: Redis, options: Options) -> None:
        lines = Lines(
            _FIELDS, contract=CONTRACT, queue=options.queue, task=options.task or options.queue
        )
        super().__init__(redis, f"{queue_base(options.queue)}:journal", lines)


def tape(store: str, options: Options) -> StreamFormat:
    """The same stream for readers in bulk; it is trimmed only behind what they captured."""
    base = queue_base(options.queue)
    return StreamFormat(
        store=store,
        key=f"{base}:journal",
        contract=CONTRACT,
        queue=options.queue,
        fields=_FIELDS,
        task=options.task or options.queue,
        captured=(f"{base}:upkeep", "captured"),
    )
