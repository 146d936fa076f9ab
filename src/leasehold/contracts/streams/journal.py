"""The history of the queue: the stream `jobs:journal`, written by the scripts.

An entry holds the transitions that one script made, up to a hundred: a field `e` each, whose value
is a line of parts joined by tabs in the order of `_FIELDS`, cut off after the last that applies.
The position of an event, `seq`, is the entry's id and the number of its line: `1794788872140-0.3`.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from leasehold.contracts.streams.options import CONTRACT, QUEUE, Options, keys
from leasehold.core.event import JournalEvent
from leasehold.core.lease import Lease
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
    "result_h",
    "payload_h",
    "error_code",
    "due_ms",
    "data",
)
_LINES_MAX = 100
NOTHING_GIVEN: tuple[str | bytes, ...] = ("",) * 6
_NUMBERS = frozenset(
    field.name for field in msgspec.structs.fields(JournalEvent) if field.type is int
)


class StreamsJournal:
    """Reads the journal stream by position; a position is a stream id."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._key = keys(options.namespace)[1]
        self._entry_ended = ""

    async def read(self, *, after: str = "", limit: int = 1000) -> list[JournalEvent]:
        """Events after a position, oldest first: at most `limit`, and always whole scripts' worth.

        A whole entry is never cut, so a few more than `limit` may come.
        """
        entry_id, _, line = after.partition(".")
        start = entry_id if line else f"({entry_id}" if entry_id else "-"
        count = max(1, limit // _LINES_MAX) + (1 if line else 0)
        entries = await self._redis.call("XRANGE", self._key, start, "+", "COUNT", count)
        return _after(entries, after)

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        """Like `read`, but blocks until there is an event; `after` "$" means from now on."""
        entry_id, _, line = after.partition(".")
        if line and after != self._entry_ended and (rest := await self.read(after=after)):
            return rest
        reply = await self._redis.block(
            "XREAD", "COUNT", 100, "BLOCK", max(1, wait_ms), "STREAMS", self._key,
            entry_id or "0-0", wait_ms=wait_ms,
        )  # fmt: skip
        events = _after(reply[0][1], "") if reply else []
        if events:  # entries come whole: after the last line of one there is no more of it to read
            self._entry_ended = events[-1].seq
        return events

    def since(self, ts_ms: int) -> str:
        """The position after which everything that happened since then lies."""
        return f"{ts_ms}-0"

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()


def decode(entry: list[Any]) -> list[JournalEvent]:
    """The events of one stream entry."""
    entry_id = entry[0].decode()
    return [
        _event(f"{entry_id}.{number}", line.decode(errors="replace"))
        for number, line in enumerate(entry[1][1::2])
    ]


def completion(lease: Lease, result_h: str) -> tuple[str | bytes, ...]:
    """What the settle script needs to end a job that is still as its holder was given it.

    The lease words it should have and shall have, its ttl_s and the end of its lease, and the
    journal line before and after the time. Nothing of that for a lease that contradicts its words:
    the script shall look closer.
    """
    if lease.extra is None:
        return NOTHING_GIVEN
    words, ttl_s = cast("tuple[str, bytes]", lease.extra)
    fence, ver, attempt, max_attempts, lost, until, worker, msg_id, rest = words.split(" ", 8)
    if (int(fence), worker, msg_id) != (lease.fence, lease.token, lease.handle):
        return NOTHING_GIVEN
    ver = str(int(ver) + 1)
    after = (
        f"\t{lease.task}\trunning\tdone\t{attempt}\t{fence}\t{fence}\t0\t{until}\t{worker}"
        f"\t{max_attempts}\t{result_h}"
    )
    return (
        words,
        f"{fence} {ver} {attempt} {max_attempts} {lost} 0 {worker} {msg_id} {rest}",
        ttl_s,
        until,
        f"{lease.job_id}\tcomplete\t{ver}\t",
        after,
    )


def _event(seq: str, line: str) -> JournalEvent:
    texts = line.split("\t", len(_FIELDS) - 1)
    values: dict[str, Any] = {
        name: _number(text) if name in _NUMBERS else text
        for name, text in zip(_FIELDS, texts, strict=False)
    }
    return JournalEvent(seq=seq, contract=CONTRACT, queue=QUEUE, **values)


def _number(text: str) -> int:
    """A line that a foreign program's names have garbled must not stop the reader."""
    return int(text) if text.isdecimal() else 0


def _after(entries: list[Any], after: str) -> list[JournalEvent]:
    """All events of the entries, without the lines up to `after` where that is inside the first."""
    events = [event for entry in entries for event in decode(entry)]
    if "." not in after:
        return events
    for position, event in enumerate(events):
        if event.seq == after:
            return events[position + 1 :]
    return events
