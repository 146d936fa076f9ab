"""The history of a queue: the stream `{queue}:journal`, written by our scripts.

An entry holds the transitions that one script made, up to a hundred: a field `e` each, whose value
is a line of parts joined by tabs in the order of `_FIELDS`, cut off after the last that applies.
The position of an event, `seq`, is the entry's id and the number of its line: `1794788872140-0.3`.
What other OmniQ clients do is not in it; the next step that we make says what it found.
"""

from __future__ import annotations

from typing import Any

import msgspec

from leasehold.contracts.omniq.options import CONTRACT, Options, queue_base
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
    "gid",
    "result_h",
    "payload_h",
    "error_code",
    "due_ms",
    "data",
)
_LINES_MAX = 100
_NUMBERS = frozenset(
    field.name for field in msgspec.structs.fields(JournalEvent) if field.type is int
)


class OmniqJournal:
    """Reads the journal stream by position."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._queue = options.queue
        self._task = options.task or options.queue
        self._key = f"{queue_base(options.queue)}:journal"
        self._entry_ended = ""

    async def read(self, *, after: str = "", limit: int = 1000) -> list[JournalEvent]:
        """Events after a position, oldest first; an entry is never cut, so a few more may come."""
        entry_id, _, line = after.partition(".")
        start = entry_id if line else f"({entry_id}" if entry_id else "-"
        count = max(1, limit // _LINES_MAX) + (1 if line else 0)
        entries = await self._redis.call("XRANGE", self._key, start, "+", "COUNT", count)
        return self._after(entries, after)

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        """Like `read`, but blocks until there is an event; `after` "$" means from now on."""
        entry_id, _, line = after.partition(".")
        if line and after != self._entry_ended and (rest := await self.read(after=after)):
            return rest
        reply = await self._redis.block(
            "XREAD", "COUNT", 100, "BLOCK", max(1, wait_ms), "STREAMS", self._key,
            entry_id or "0-0", wait_ms=wait_ms,
        )  # fmt: skip
        events = self._after(reply[0][1], "") if reply else []
        if events:  # entries come whole: after the last line of one there is no more of it to read
            self._entry_ended = events[-1].seq
        return events

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    def _after(self, entries: list[Any], after: str) -> list[JournalEvent]:
        """All events of the entries, without the lines up to `after` where it is in the first."""
        events = [event for entry in entries for event in self._decode(entry)]
        if "." in after:
            for position, event in enumerate(events):
                if event.seq == after:
                    return events[position + 1 :]
        return events

    def _decode(self, entry: list[Any]) -> list[JournalEvent]:
        entry_id = entry[0].decode()
        return [
            self._event(f"{entry_id}.{number}", line.decode(errors="replace"))
            for number, line in enumerate(entry[1][1::2])
        ]

    def _event(self, seq: str, line: str) -> JournalEvent:
        texts = line.split("\t", len(_FIELDS) - 1)
        values: dict[str, Any] = {
            name: _number(text) if name in _NUMBERS else text
            for name, text in zip(_FIELDS, texts, strict=False)
        }
        if values.get("job_id") and not values.get("task"):
            values["task"] = self._task
        return JournalEvent(seq=seq, contract=CONTRACT, queue=self._queue, **values)


def _number(text: str) -> int:
    """A line that a foreign program's names have garbled must not stop the reader."""
    return int(text) if text.isdecimal() else 0
