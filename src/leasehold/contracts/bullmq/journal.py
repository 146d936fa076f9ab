"""The history of the queue: the stream `<prefix>:<queue>:leasehold:journal`, beside BullMQ's keys.

An entry holds the transitions that one script made, up to a hundred: a field `e` each, whose value
is a line of parts joined by tabs in the order of `_FIELDS`. Parts are only ever added at the end.
The position of an event, `seq`, is the entry's id and the number of its line: `1794788872140-0.3`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from leasehold.contracts.bullmq.options import CONTRACT, Options, keys
from leasehold.core.event import JournalEvent
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
_LINES_MAX = 100
_NUMBERS = frozenset(
    field.name for field in msgspec.structs.fields(JournalEvent) if field.type is int
)


class BullmqJournal:
    """Reads the journal stream by position; a position is a stream id."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._key = keys(options.key_prefix)[15]
        self._queue = options.queue

    async def read(self, *, after: str = "", limit: int = 1000) -> list[JournalEvent]:
        """Events after a position, oldest first: at most `limit`, and always whole scripts' worth.

        A whole entry is never cut, so a few more than `limit` may come.
        """
        entry_id, _, line = after.partition(".")
        start = entry_id if line else f"({entry_id}" if entry_id else "-"
        count = max(1, limit // _LINES_MAX) + (1 if line else 0)
        entries = await self._redis.call("XRANGE", self._key, start, "+", "COUNT", count)
        return _after(entries, after, self._queue)

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        """Like `read`, but blocks until there is an event; `after` "$" means from now on."""
        entry_id, _, line = after.partition(".")
        if line and (rest := await self.read(after=after)):
            return rest
        reply = await self._redis.block(
            "XREAD", "COUNT", 100, "BLOCK", max(1, wait_ms), "STREAMS", self._key,
            entry_id or "0-0", wait_ms=wait_ms,
        )  # fmt: skip
        return _after(reply[0][1], "", self._queue) if reply else []

    def since(self, ts_ms: int) -> str:
        """The position after which everything that happened since then lies."""
        return f"{ts_ms}-0"

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()


def decode(entry: list[Any], queue: str) -> list[JournalEvent]:
    """The events of one stream entry."""
    entry_id = entry[0].decode()
    return [
        _event(f"{entry_id}.{number}", line.decode(errors="replace"), queue)
        for number, line in enumerate(entry[1][1::2])
    ]


def _event(seq: str, line: str, queue: str) -> JournalEvent:
    texts = line.split("\t", len(_FIELDS) - 1)
    values: dict[str, Any] = {
        name: _number(text) if name in _NUMBERS else text
        for name, text in zip(_FIELDS, texts, strict=False)
    }
    return JournalEvent(seq=seq, contract=CONTRACT, queue=queue, **values)


def _number(text: str) -> int:
    """A line that a foreign program's names have garbled must not stop the reader."""
    return int(text) if text.isdecimal() else 0


def _after(entries: list[Any], after: str, queue: str) -> list[JournalEvent]:
    """All events of the entries, without the lines up to `after` where that is inside the first."""
    events = [event for entry in entries for event in decode(entry, queue)]
    if "." not in after:
        return events
    for position, event in enumerate(events):
        if event.seq == after:
            return events[position + 1 :]
    return events
