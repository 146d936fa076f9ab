"""Upkeep of a queue: promote, reclaim, expire, decide, remove. Any worker may run it."""

from __future__ import annotations

import asyncio

from tenure.core.errors import ServerError
from tenure.core.seam import Upkeep
from tenure.sql.engine import OUTBOX, Engine, QueueSettings
from tenure.sql.settle import decide

_COUNT = 1_000
_WINDOWS = 10
_TRIM_EVERY_S = (10.0, 60.0)
"""How soon a sweep of old rows follows one that found some, and one that found none."""

_BEAT_EVERY_S = 5.0
_UNBLOCK_EVERY_S = 5.0
TOMBSTONE_MS = 30 * 86_400_000


class Upkeeper:
    """Upkeep of one box."""

    def __init__(self, engine: Engine, settings: QueueSettings, worker_id: str) -> None:
        self._engine = engine
        self._settings = settings
        self._worker_id = worker_id
        self.slots = 0
        self._trim_at = float("-inf")
        self._beaten = (float("-inf"), 0)
        self._pruned_to = 0
        self._trimmed_to = 0
        self._unblocked_to = 0
        self._unblock_at = float("-inf")

    async def upkeep(self) -> Upkeep:
        """One round."""
        table, queue = self._settings.table, self._settings.queue
        await self._beat()
        (found,) = await self._engine.run(table, "chores", queue=queue)
        promoted = reclaimed = buried = expired = 0
        if found["overdue"]:
            promoted, reclaimed, buried, expired = await self.due()
        elif found["held_back"]:
            await self.unblock()
        if found["resting"]:  # what a worker failed that died before it decided
            buried += await self._decide()
        pruned = await self._prune()
        return Upkeep(promoted, reclaimed, buried, expired, pruned + await self._trim())

    async def _beat(self) -> None:
        """Say now and then that the worker lives, and at once when it has other slots."""
        now, (beaten, slots) = asyncio.get_running_loop().time(), self._beaten
        if not self._worker_id:  # who keeps up for others is no worker
            return
        if now - beaten < _BEAT_EVERY_S and slots == self.slots:
            return
        await self._engine.run(
            self._settings.table,
            "beat",
            queue=self._settings.queue,
            worker_id=self._worker_id,
            slots=self.slots,
        )
        self._beaten = (now, self.slots)

    async def due(self) -> tuple[int, int, int, int]:
        """What a claim cannot do without: promoted, taken back, buried, expired."""
        run, table, queue = self._engine.run, self._settings.table, self._settings.queue
        reaped = await run(
            table, "reap", queue=queue, lost_max=self._settings.lost_max, count=_COUNT
        )
        expired = await run(table, "expire", queue=queue, count=_COUNT)
        failed = expired[0]["expired"] or any(row["ends"] for row in reaped)
        buried = await self._decide() if failed else 0
        promoted = await run(
            table, "promote", queue=queue, count=_COUNT, channel=self._engine.channel
        )
        await self.unblock()
        return promoted[0]["promoted"], len(reaped), buried, expired[0]["expired"]

    async def _decide(self) -> int:
        """Lead jobs on that rest in `failed`; how many were given up."""
        settings = self._settings
        rows = await self._engine.run(settings.table, "resting", queue=settings.queue, count=_COUNT)
        try:
            return await decide(self._engine, settings, [row["job_id"] for row in rows])
        except ServerError as error:  # of one job; those after it in this round must not wait
            _warn("the database refuses a step of a failed job", settings.queue, error)
            return 0

    async def unblock(self) -> int:
        """Events that were written while the one before them ended; how many were let go.

        The end of an event lets the next one go, if it is there to be seen. One that is just being
        written is not, and would wait for ever.
        """
        now = asyncio.get_running_loop().time()
        if self._settings.table != OUTBOX or now < self._unblock_at:
            return 0
        if self._engine.dialect == "sqlite":  # has one writer: only who removes an event leaves one
            self._unblock_at = now + _UNBLOCK_EVERY_S
        freed, self._unblocked_to = await self._sweep("unblock", "freed", self._unblocked_to)
        return freed

    async def _prune(self) -> int:
        keep_ms = self._settings.keep_ms
        if not keep_ms:
            return 0
        pruned, self._pruned_to = await self._sweep(
            "prune", "pruned", self._pruned_to, keep_ms=keep_ms
        )
        return pruned

    async def _trim(self) -> int:
        now = asyncio.get_running_loop().time()
        if now < self._trim_at:
            return 0
        table, queue = self._settings.table, self._settings.queue
        await self._engine.run(table, "trim", queue=queue, tombstone_ms=TOMBSTONE_MS)
        trimmed, self._trimmed_to = await self._sweep(
            "trim_journal",
            "trimmed",
            self._trimmed_to,
            journal_ms=self._settings.journal_ms,
            unread_ms=self._settings.unread_ms,
        )
        soon_s, later_s = _TRIM_EVERY_S
        self._trim_at = now + (soon_s if trimmed or self._trimmed_to else later_s)
        return trimmed

    async def _sweep(self, operation: str, count: str, after: int, **age: int) -> tuple[int, int]:
        """A few windows of rows from where the last sweep ended; 0 begins again at the oldest."""
        gone = 0
        for _ in range(_WINDOWS):
            rows = await self._engine.run(
                self._settings.table,
                operation,
                queue=self._settings.queue,
                after=after,
                count=_COUNT,
                **age,
            )
            gone += rows[0][count]
            after = rows[0]["last"]
            if not after:
                break
        return gone, after


def _warn(text: str, queue: str, error: Exception) -> None:
    """Write a line. A program that only reads a queue does not load what writes it."""
    import structlog

    structlog.get_logger("tenure.sql").warning(text, queue=queue, error=str(error))
