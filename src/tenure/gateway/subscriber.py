"""One client's end of the feed: frames that wait to be written, bounded, without a lock.

A subscriber first catches up from its own position, at the pace at which its client reads; then it
is live and the feed pushes to it. A live client that reads too slowly loses its connection, not
its place: it comes back with Last-Event-ID.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tenure.core.job import JobEvent
from tenure.gateway.frames import comment, frame, position

_TOO_SLOW = comment("you read too slowly; reconnect and go on from your Last-Event-ID")


class Subscriber:
    """Made by `Feed.subscribe`; `next` is for the one task that writes to the client."""

    __slots__ = (
        "_bytes_max",
        "_catch_up",
        "_chunks",
        "_size",
        "_waiter",
        "cursor",
        "ended",
        "event_id",
        "job_id",
        "live",
        "masked",
        "on_overflow",
        "page",
        "pushed_s",
    )

    def __init__(
        self,
        job_id: str,
        after: str,
        *,
        bytes_max: int,
        now_s: float,
        catch_up: Callable[[Subscriber], Awaitable[None]],
    ) -> None:
        self.job_id = job_id
        self.event_id = after
        self.cursor = position(after)
        self.live = False
        self.masked = False
        self.ended = False
        self.page = 1
        self.pushed_s = now_s
        self.on_overflow: Callable[[], object] | None = None
        self._bytes_max = bytes_max
        self._catch_up = catch_up
        self._chunks: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_behind(self) -> bool:
        """Whether so much waits to be written that a live client would lose its connection."""
        return self._size > self._bytes_max

    def push(self, chunk: bytes) -> None:
        """Hand over bytes to be written; too many of them end a live subscriber."""
        if self.ended:
            return
        self._chunks.append(chunk)
        self._size += len(chunk)
        if self.live and self._size > self._bytes_max:
            self._chunks.clear()
            self._size = 0
            self.end(_TOO_SLOW)
            if self.on_overflow is not None:
                self.on_overflow()
            return
        self._wake()

    def event(self, event: JobEvent, framed: bytes, *, at: tuple[int, ...], last: bool) -> bool:
        """Hand over one event unless it was had before; `last` ends the stream after it."""
        if self.ended or at <= self.cursor:
            return False
        self.cursor = at
        self.event_id = event.event_id
        self.push(framed)
        if last:
            self.end()
        return True

    def end(self, chunk: bytes = b"") -> None:
        """Nothing more will come; what waits, and then `chunk`, is still written."""
        if self.ended:
            return
        if chunk:
            self._chunks.append(chunk)
        self.ended = True
        self._wake()

    async def next(self) -> bytes | None:
        """Everything that waits, as one piece; None when the stream has ended."""
        while not self._chunks:
            if self.ended:
                return None
            if self.live:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            else:
                await self._catch_up(self)
        chunks, self._chunks, self._size = self._chunks, [], 0
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def deliver(subscriber: Subscriber, event: JobEvent, final: frozenset[str]) -> bool:
    """Frame and hand over one event to one subscriber (the feed frames once for many)."""
    at = position(event.event_id)
    return subscriber.event(event, frame(event), at=at, last=event.type in final)
