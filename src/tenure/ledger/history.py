"""The journal of a box, read by position and never past a writer that has not committed."""

from __future__ import annotations

import asyncio

from tenure.core.errors import UsageError
from tenure.core.journal import JournalEvent
from tenure.ledger.engine import OUTBOX, Engine, Row
from tenure.ledger.settings import BoxSettings

_WAIT_MS = 250
# The history of an outbox lies among the steps of its jobs; so many of them are looked through at a
# time, since there may be millions that told of no event.
SPAN = 50_000
# A position by time, until it is looked up. Writers at the same moment may commit in any order.
_AT = "@"
_DISORDER_MS = 5_000
EVENT_FIELDS = (
    *("ver", "task", "from_state", "to_state", "attempt", "fence", "prev_fence", "token_h"),
    *("worker_id", "lease_until_ms", "prev_lease_until_ms", "gid", "priority", "due_ms"),
    *("max_attempts", "error_code", "payload_h", "result_h", "data"),
)


class BoxJournal:
    """The history of one box. A position is a number that rises."""

    def __init__(self, engine: Engine, settings: BoxSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._bell = engine.journal_bell(settings.queue)
        self._empty: dict[int, int] = {}

    async def read(self, *, after: str = "", limit: int = 1000) -> list[JournalEvent]:
        """Events after a position, oldest first."""
        after = await self._position(after)
        if after and not after.isdecimal():
            raise UsageError(
                f"{after!r} is not a position of this journal", contract=self._settings.contract
            )
        rows = await self._rows(int(after or 0), await self._engine.settled_position(), limit)
        return [_event(row, self._settings.contract) for row in rows]

    async def _rows(self, after: int, upto: int, limit: int) -> list[Row]:
        settings, rows = self._settings, list[Row]()
        at = max(after, self._empty.get(after, 0))
        while at < upto and len(rows) < limit:
            end = min(upto, at + SPAN) if settings.table == OUTBOX else upto
            rows += await self._engine.run(
                *(settings.table, "journal"),
                queue=settings.queue,
                after=at,
                upto=end,
                count=limit - len(rows),
            )
            at = end
        # Whoever waits asks again from where he stands: not for what was looked through already.
        self._empty = {} if rows else {after: at}
        return rows

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        """Like `read`, but waits for the first event; `after` "$" means from now on."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        if after == "$":
            after = str(await self._engine.settled_position())
        after = await self._position(after)
        while True:
            await self._bell.arm()
            events = await self.read(after=after)
            left_ms = round((deadline - loop.time()) * 1000)
            if events or left_ms <= 0:
                return events
            await self._bell.wait(min(left_ms, _WAIT_MS))

    def since(self, ts_ms: int) -> str:
        """The position after which everything that happened since then lies."""
        return f"{_AT}{ts_ms}"

    async def _position(self, after: str) -> str:
        """`after` as a number: a time is looked for by halving, as `ts_ms` rises with `seq`."""
        if not after.startswith(_AT):
            return after
        wanted_ms = int(after.removeprefix(_AT)) - _DISORDER_MS
        low, high = 0, await self._engine.settled_position()
        at = high
        while low < high:
            rows = await self._engine.run(
                self._settings.table, "journal_at", queue=self._settings.queue, seq=at
            )
            if not rows or rows[0]["ts_ms"] < wanted_ms:
                low = at
            else:
                high = rows[0]["seq"] - 1
            at = (low + high + 1) // 2
        return str(low)

    async def close(self) -> None:
        """Close the connections."""
        await self._bell.close()
        await self._engine.close()


def _event(row: Row, contract: str) -> JournalEvent:
    return JournalEvent(
        seq=str(row["seq"]),
        contract=contract,
        queue=row["queue"],
        job_id=row["job_id"],
        type=row["type"],
        ts_ms=row["ts_ms"],
        **{name: row[name] for name in EVENT_FIELDS},
    )
