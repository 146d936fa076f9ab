"""Upkeep of a queue: promote, reclaim, expire, decide, remove. Any worker may run it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tenure.core.errors import ServerError
from tenure.core.seam import Upkeep
from tenure.sql.engine import OUTBOX, Engine, QueueSettings, Row
from tenure.sql.settle import decide

_COUNT = 1_000
_SWEEPS = 10
_TRIM_EVERY_S = (10.0, 60.0)
"""The pause after a sweep of old rows that found some, and after one that found none."""

_HEARTBEAT_EVERY_S = 5.0
_UNBLOCK_EVERY_S = 5.0
_TOMBSTONE_MS = 30 * 86_400_000


class Upkeeper:
    """Upkeep of one queue. Without a `worker_id` it sends no heartbeat."""

    def __init__(self, engine: Engine, settings: QueueSettings, worker_id: str) -> None:
        self._engine = engine
        self._settings = settings
        self._worker_id = worker_id
        self.slots = 0
        self._trim_at = float("-inf")
        self._last_heartbeat = (float("-inf"), 0)
        self._pruned_to = 0
        self._trimmed_to = 0
        self._unblocked_to = 0
        self._unblock_at = float("-inf")

    async def upkeep(self) -> Upkeep:
        """One round."""
        await self._heartbeat()
        (found,) = await self._run("upkeep_needed")
        promoted = reclaimed = buried = expired = 0
        if found["overdue"]:
            promoted, reclaimed, buried, expired = await self.due()
        elif found["held_back"]:
            await self.unblock()
        if found["has_failed"]:  # a worker died between `failed` and `decide`
            buried += await self._decide()
        pruned = await self._prune()
        return Upkeep(promoted, reclaimed, buried, expired, pruned + await self._trim())

    async def _heartbeat(self) -> None:
        """Send a heartbeat every few seconds, and at once when the slots changed."""
        now, (sent_at, slots) = asyncio.get_running_loop().time(), self._last_heartbeat
        if not self._worker_id or (now - sent_at < _HEARTBEAT_EVERY_S and slots == self.slots):
            return
        await self._run("heartbeat", worker_id=self._worker_id, slots=self.slots)
        self._last_heartbeat = (now, self.slots)

    async def due(self) -> tuple[int, int, int, int]:
        """Make due jobs claimable; how many were promoted, reclaimed, buried and expired."""
        reaped = await self._run("reap", lost_max=self._settings.lost_max, count=_COUNT)
        expired = await self._run("expire", count=_COUNT)
        failed = expired[0]["expired"] or any(row["ends"] for row in reaped)
        buried = await self._decide() if failed else 0
        promoted = await self._run("promote", count=_COUNT, channel=self._engine.channel)
        await self.unblock()
        return promoted[0]["promoted"], len(reaped), buried, expired[0]["expired"]

    async def _decide(self) -> int:
        """Decide about jobs in `failed`; how many were given up."""
        settings = self._settings
        rows = await self._run("failed_jobs", count=_COUNT)
        try:
            return await decide(self._engine, settings, [row["job_id"] for row in rows])
        except ServerError as error:  # one job is at fault; the rest of the round goes on
            # A program that only reads a queue does not import the logger.
            import structlog

            structlog.get_logger("tenure.sql").warning(
                "the database refuses a step of a failed job",
                queue=settings.queue,
                error=str(error),
            )
            return 0

    async def unblock(self) -> int:
        """Make events ready whose earlier events have all ended; how many.

        The end of event N makes event N+1 ready. But event N+1 may commit after that, and then
        nothing has made it ready.
        """
        now = asyncio.get_running_loop().time()
        if self._settings.table != OUTBOX or now < self._unblock_at:
            return 0
        if self._engine.dialect == "sqlite":  # with one writer, only a removal leaves such events
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
        await self._run("trim", tombstone_ms=_TOMBSTONE_MS)
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
        """Process a few batches of rows, from where the last sweep ended (0: the oldest)."""
        total = 0
        for _ in range(_SWEEPS):
            rows = await self._run(operation, after=after, count=_COUNT, **age)
            total += rows[0][count]
            after = rows[0]["last"]
            if not after:
                break
        return total, after

    async def _run(self, operation: str, **params: Any) -> Sequence[Row]:
        settings = self._settings
        return await self._engine.run(settings.table, operation, queue=settings.queue, **params)
