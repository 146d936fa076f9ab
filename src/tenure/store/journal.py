"""Reads the journal of the Redis contracts: a stream whose entries hold lines, one line an event.

An entry holds the events of one script, at most a hundred. Each is a field `e` whose value is a
line: tab-separated columns, first those of `HEAD`, then others in the contract's order. Empty
columns at the end may be missing. If the same event happened to many jobs, the entry has a field
`s`, the line without its job id, and a field `ids`, the job ids joined by tabs. (Older entries have
a field `i` for each id.)

The cursor of an event, its `seq`, is the entry's id and the number of the line in it, such as
`1794788872140-0.3`. The id of an entry alone is a cursor too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from tenure.core.journal import JournalEvent
from tenure.store.redis import Redis

HEAD = (
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
)
"""The first columns of every contract's lines."""

_LINES_MAX = 100
_TABS_MIN = 3  # a line has at least job, type, version and time
_DIGITS_MAX = 19  # numbers beyond 64 bits are not ours
_ENTRY_MAX = 2**64 - 1  # the largest number after the `-` of an entry's id
_NUMBERS = frozenset(
    field.name for field in msgspec.structs.fields(JournalEvent) if field.type is int
)


def lines_of(fields: Sequence[bytes]) -> Sequence[bytes]:
    """The lines of one stream entry."""
    if not fields or fields[0] != b"s":
        return fields[1::2]
    if len(fields) < 4:
        return ()
    tail = fields[1]
    ids = fields[3].split(b"\t") if fields[2] == b"ids" else fields[3::2]
    return [job_id + tail for job_id in ids]


class LineFormat:
    """Parses the lines of one queue. `fields` names the columns, `task` is for lines without it."""

    def __init__(self, fields: Sequence[str], *, contract: str, queue: str, task: str = "") -> None:
        self._fields = tuple(fields)
        self._task = task
        self._contract = contract
        self._queue = queue

    def decode(self, entry: list[Any]) -> list[JournalEvent]:
        """The events of one stream entry; values that are not lines of ours are skipped."""
        entry_id = entry[0].decode()
        return [
            self._event(f"{entry_id}.{number}", line.decode(errors="replace"))
            for number, line in enumerate(lines_of(entry[1]))
            if line.count(b"\t") >= _TABS_MIN
        ]

    def after(self, entries: list[Any], after: str) -> list[JournalEvent]:
        """The events of these entries that come after a cursor."""
        events = [event for entry in entries for event in self.decode(entry)]
        if "." not in after:
            return events
        for index, event in enumerate(events):
            if event.seq == after:
                return events[index + 1 :]
        return events

    def _event(self, seq: str, line: str) -> JournalEvent:
        texts = line.split("\t", len(self._fields) - 1)
        values: dict[str, Any] = {
            name: _number(text) if name in _NUMBERS else text
            for name, text in zip(self._fields, texts, strict=False)
        }
        if self._task and values.get("job_id") and not values.get("task"):
            values["task"] = self._task
        return JournalEvent(seq=seq, contract=self._contract, queue=self._queue, **values)


class RedisJournal:
    """Reads a journal stream in pages, each after a cursor."""

    def __init__(self, redis: Redis, key: str, lines: LineFormat) -> None:
        self._redis = redis
        self._key = key
        self._lines = lines
        self._entry_end = ""  # a cursor that is known to be the last of its entry

    async def read(self, *, after: str = "", limit: int = 1000) -> list[JournalEvent]:
        """Events after a cursor, oldest first: about `limit`, since entries are read whole."""
        entry_id, _, line = after.partition(".")
        start = entry_id if line else f"({entry_id}" if entry_id else "-"
        count = max(1, limit // _LINES_MAX) + (1 if line else 0)
        while True:
            entries = await self._redis.call("XRANGE", self._key, start, "+", "COUNT", count)
            events = self._lines.after(entries, after)
            if events or len(entries) < count:
                return events
            start = f"({entries[-1][0].decode()}"  # none of them was ours

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        """Like `read`, but waits for the first event; `after` may be `NOW`, which XREAD knows."""
        entry_id, _, line = after.partition(".")
        if line and after != self._entry_end and (rest := await self.read(after=after)):
            return rest
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        while True:
            left_ms = max(1, round((deadline - loop.time()) * 1000))
            reply = await self._redis.block(
                "XREAD", "COUNT", 100, "BLOCK", left_ms, "STREAMS", self._key,
                entry_id or "0-0", wait_ms=left_ms,
            )  # fmt: skip
            events = self._lines.after(reply[0][1], "") if reply else []
            if events:  # entries are read whole, so nothing of the last one is left
                self._entry_end = events[-1].seq
            if events or not reply or loop.time() >= deadline:
                return events
            entry_id = reply[0][1][-1][0].decode()  # none of them was ours

    async def last(self) -> str:
        """The id of the newest entry."""
        entries = await self._redis.call("XREVRANGE", self._key, "+", "-", "COUNT", 1)
        return entries[0][0].decode() if entries else ""

    def since(self, ts_ms: int) -> str:
        """The cursor before every event since this time."""
        # The first entry of a millisecond is number 0, and a cursor excludes its own entry.
        return f"{max(ts_ms - 1, 0)}-{_ENTRY_MAX}"

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()


def _number(text: str) -> int:
    """0 if it is not a number: a garbled line must not stop the reader."""
    return int(text) if text.isdecimal() and len(text) < _DIGITS_MAX else 0
