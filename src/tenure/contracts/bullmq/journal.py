"""The history of the queue: the stream `<prefix>:<queue>:tenure:journal`, beside BullMQ's keys.

Lines as `store.journal` reads them: parts in the order of `_FIELDS`; parts are only ever added at
the end.
"""

from __future__ import annotations

from tenure.contracts.bullmq.options import CONTRACT, Options, keys
from tenure.core.journal import JournalEvent, StreamFormat
from tenure.store.journal import HEAD, Lines, StreamJournal
from tenure.store.redis import Redis

_NEWS_MAX = 1_000
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


class BullmqNews:
    """The queue's event stream as what names the jobs that move.

    Node's workers write it and not our journal, so followers of jobs read this one.
    """

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._key = keys(options.key_prefix).events
        self._queue = options.queue

    async def last(self) -> str:
        """The position of the newest event."""
        entries = await self._redis.call("XREVRANGE", self._key, "+", "-", "COUNT", 1)
        return entries[0][0].decode() if entries else ""

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        """Events after a position, each with the state that it names; waits for the first."""
        reply = await self._redis.block(
            "XREAD", "COUNT", _NEWS_MAX, "BLOCK", wait_ms, "STREAMS", self._key, after or "0-0",
            wait_ms=wait_ms,
        )  # fmt: skip
        return [self._event(*entry) for entry in reply[0][1]] if reply else []

    def _event(self, seq: bytes, flat: list[bytes]) -> JournalEvent:
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        word = fields.get(b"event", b"").decode(errors="replace")
        return JournalEvent(
            seq=seq.decode(),
            contract=CONTRACT,
            queue=self._queue,
            job_id=fields.get(b"jobId", b"").decode(errors="replace"),
            type=word,
            to_state=word,
            ts_ms=int(seq.partition(b"-")[0]),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()


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
