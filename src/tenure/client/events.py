"""How a feed reads the events of jobs: of many at once, and those that no journal names."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from tenure.core.errors import ServerError, StoreError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.seam import EventWaiter, Ledger

WAIT_MS = 2_000
AWAY_S = 0.5
"""The pause after a failed call of a store."""
# The reader waits for this long, so that followers that come together are read together.
_GATHER_S = 0.002
# It always reads up to this many streams, and more only if there are foreign workers.
FEW_STREAMS = 200
# A read costs store and reader some microseconds a stream. The pause after it bounds that share.
_PAUSE_S_PER_STREAM = 2e-5


class FollowLedger(Protocol):
    """What the feed needs of a contract's ledger."""

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None if there is none (any more)."""

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """Events of one job after a cursor."""

    async def changes(self, cursors: Mapping[str, str]) -> dict[str, list[JobEvent]]:
        """New events of many jobs, each after its own cursor, without waiting."""


async def read_changes(
    ledger: FollowLedger, cursors: Mapping[str, str]
) -> tuple[dict[str, list[JobEvent]], list[str]]:
    """New events by job, and the jobs that cannot be read, which are found by bisection.

    A key of the wrong type, written by another program, must not stop the other streams.
    """
    try:
        return await ledger.changes(cursors), []
    except Exception as error:
        if is_away(error):
            raise
        if len(cursors) == 1:
            logger().warning("events_unreadable", job_id=next(iter(cursors)), error=str(error))
            return {}, list(cursors)
    pairs = list(cursors.items())
    left, left_bad = await read_changes(ledger, dict(pairs[: len(pairs) // 2]))
    right, right_bad = await read_changes(ledger, dict(pairs[len(pairs) // 2 :]))
    return left | right, left_bad + right_bad


class FollowedLedger:
    """A ledger for the feed. Without the feature `changes` each job takes one call."""

    def __init__(self, ledger: Ledger) -> None:
        self.get = ledger.get
        self.events = ledger.events
        self._changes = ledger.features.changes or self._events_by_job

    async def changes(self, cursors: Mapping[str, str]) -> dict[str, list[JobEvent]]:
        """The new events of many jobs, each after its own cursor, without waiting."""
        return await self._changes(cursors)

    async def _events_by_job(self, cursors: Mapping[str, str]) -> dict[str, list[JobEvent]]:
        reads = [self.events(job_id, after=after) for job_id, after in cursors.items()]
        return dict(zip(cursors, await asyncio.gather(*reads), strict=True))


class UnjournaledTail:
    """Reads events that no journal names: those of workers that know only the contract.

    Such a worker appends to the job's event stream and writes no journal. One blocking read over
    the streams of the followed jobs returns its events as they happen. Jobs that a worker of ours
    has claimed are left out. With many followers this reads only while the queue has foreign
    workers. `cursors` gives the jobs to read, {} if there are more than its argument.
    `deliver` takes their events; `read` finds an unreadable stream.
    """

    def __init__(
        self,
        ledger: EventWaiter,
        *,
        cursors: Callable[[float], dict[str, str]],
        deliver: Callable[[str, list[JobEvent]], Awaitable[object]],
        read: Callable[[list[str]], Awaitable[None]],
        few_streams: int = FEW_STREAMS,
    ) -> None:
        self._ledger = ledger
        self._cursors = cursors
        self._deliver = deliver
        self._read = read
        self._few = few_streams
        self._changed = asyncio.Event()
        self._waiting = False
        self._interrupting: asyncio.Task[None] | None = None
        self.foreign = False

    def add(self) -> None:
        """There are more jobs to read: start a new wait that includes them."""
        self._changed.set()
        if self._waiting and (self._interrupting is None or self._interrupting.done()):
            self._interrupting = asyncio.create_task(self._interrupt())

    async def check_foreign(self) -> None:
        """Check whether the queue has foreign workers."""
        was, self.foreign = self.foreign, await self._ledger.has_foreign_workers()
        if self.foreign and not was:
            self.add()

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            self._changed.clear()
            cursors = self._cursors(math.inf if self.foreign else self._few)
            if not cursors:
                await self._changed.wait()
                await asyncio.sleep(_GATHER_S)
                continue
            self._waiting = True
            try:
                news = await self._ledger.wait_changes(cursors, wait_ms=WAIT_MS)
            except Exception as error:
                await self._recover(error, list(cursors))
                continue
            finally:
                self._waiting = False
            for job_id, events in news.items():
                await self._deliver(job_id, events)
            await asyncio.sleep(len(cursors) * _PAUSE_S_PER_STREAM)

    async def _recover(self, error: Exception, job_ids: list[str]) -> None:
        """After a failed wait: find the unreadable stream, and pause in any case."""
        if not is_away(error):
            try:
                await self._read(job_ids)
            except Exception as failed:
                if not is_away(failed):
                    logger().error("feed_failed", exc_info=failed)
        await asyncio.sleep(AWAY_S)

    async def _interrupt(self) -> None:
        try:
            await self._ledger.interrupt()
        except Exception as error:  # the store is away: the wait has ended by itself
            if not is_away(error):
                raise


def logger() -> Any:
    """The log of the feed. A client whose store never fails does not load what writes it."""
    import structlog

    return structlog.get_logger("tenure.feed")


def is_away(error: Exception) -> bool:
    """Whether the store as a whole fails, so that waiting helps."""
    wrong_type = isinstance(error, ServerError) and str(error.reply).startswith("WRONGTYPE")
    return isinstance(error, StoreError) and not wrong_type
