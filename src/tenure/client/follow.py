"""The events of one job, at the pace of the one who reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from tenure.core.errors import NotFound, UsageError
from tenure.core.job import JobEvent, position

if TYPE_CHECKING:
    from tenure.client.feed import JobFeed

_PAGE = 500
_BUFFER_MAX = 1_000


class EventFollower:
    """A reader of one job's events. What it has no room for, it reads again from the store."""

    __slots__ = (
        "_buffer", "_failed", "_feed", "_waiter", "cursor", "ended", "event_id", "job_id", "live",
        "page",
    )  # fmt: skip

    def __init__(self, feed: JobFeed[EventFollower], job_id: str, after: str) -> None:
        self.job_id = job_id
        self.event_id = after
        self.cursor = position(after)
        self.live = False
        self.ended = False
        self.page = _PAGE
        self._feed = feed
        self._buffer: deque[JobEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._failed = False

    def take(self, event: JobEvent, *, at: tuple[int, ...], last: bool) -> bool:
        """Add an event unless it was there before; a full buffer sends the reader to the store."""
        if self.ended or at <= self.cursor:
            return True
        if len(self._buffer) >= _BUFFER_MAX:
            self.live = False
            return False
        self.event_id, self.cursor = event.event_id, at
        self._add(event)
        self.ended = last
        return True

    def finish(self, last: JobEvent | None) -> None:
        """There are no more events."""
        if not self.ended:
            self.ended = True
            if last is None:
                self._failed = True
                self._wake()
            else:
                self._add(last)

    async def next(self) -> JobEvent | None:
        """The next event; None after the last one."""
        while not self._buffer:
            if self._failed and self._feed.closed:
                raise UsageError("the client was closed while the events of a job were followed")
            if self._failed:
                raise NotFound(f"the events of job {self.job_id} cannot be read (any more)")
            if self.ended:
                return None
            if self.live:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            else:
                await self._feed.settled()
                await self._feed.catch_up(self)
        return self._buffer.popleft()

    def _add(self, event: JobEvent) -> None:
        self._buffer.append(event)
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
