"""The line of those who wait for a job: whoever waits longest is woken first, and one at a time.

However many workers wait, a ring wakes one of them; when it found something, it wakes the next
one, because there may be more. An empty look ends the chain. So two thousand idle workers cost one
look a second and not two thousand.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

from tenure.sql.engine import QueueListener

# A look when nothing rang, spread so that planes do not come together.
POLL_MS = (500, 1_500)
# Listening goes on for so long after the last one left: workers come back within moments.
IDLE_S = 30.0


class Waiter:
    """Somebody who waits for jobs of some streams."""

    __slots__ = ("streams", "woken")

    def __init__(self, streams: tuple[str, ...]) -> None:
        self.streams = frozenset(streams)
        self.woken = asyncio.Event()


class Line:
    """Everybody who waits at one plane."""

    def __init__(self, bell: Callable[[str], QueueListener]) -> None:
        self._bell = bell
        self._waiting: dict[Waiter, None] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._joined: dict[str, asyncio.Event] = {}
        self._due_ms: dict[str, int] = {}
        self.closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, streams: tuple[str, ...]) -> Waiter:
        """Stand at the end of the line. Join before looking, so that no ring is missed."""
        waiter = Waiter(streams)
        self._waiting[waiter] = None
        for stream in streams:
            self._joined.setdefault(stream, asyncio.Event()).set()
            if stream not in self._watches and not self.closed:
                self._watches[stream] = asyncio.create_task(self._watch(stream))
        return waiter

    def leave(self, waiter: Waiter, *, found: bool) -> None:
        """Go; whoever found something, or did not use its wake-up, wakes the next."""
        self._waiting.pop(waiter, None)
        if found or waiter.woken.is_set():
            for stream in waiter.streams:
                self.wake(stream)

    def wake(self, stream: str) -> None:
        """Wake the one who waits longest for this stream and is not awake."""
        for waiter in self._waiting:
            if stream in waiter.streams and not waiter.woken.is_set():
                waiter.woken.set()
                return

    def due(self, stream: str, due_in_ms: int) -> None:
        """In how many milliseconds a job of the stream is due (0: none known)."""
        self._due_ms[stream] = due_in_ms

    def end(self) -> None:
        """Wake everybody for good."""
        self.closed = True
        for waiter in self._waiting:
            waiter.woken.set()

    async def close(self) -> None:
        """Stop listening."""
        self.end()
        watches = list(self._watches.values())
        self._watches.clear()
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, stream: str) -> None:
        """Listen for one stream while somebody waits for it, and for a while after that."""
        bell, joined = self._bell(stream), self._joined[stream]
        try:
            while True:
                if not any(stream in waiter.streams for waiter in self._waiting):
                    await bell.rest(more=True)  # the ring that ended the wait is another plane's
                    joined.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(IDLE_S):
                            await joined.wait()
                    if not joined.is_set():  # a waiter may join in the moment of the timeout
                        return
                await bell.arm()
                self.wake(stream)
                poll_ms = random.randint(*POLL_MS)
                await bell.wait(max(1, min(poll_ms, self._due_ms.get(stream) or poll_ms)))
        finally:
            if self._watches.get(stream) is asyncio.current_task():
                del self._watches[stream]
            await bell.close()
