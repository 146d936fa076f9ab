"""The page's pulse: one event stream that says what moved and how many, four times a second.

It carries no payload: pages fetch again what they show. Seconds that are over come as figures for
the charts. A page that comes back after a break begins with the whole window.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec
from starlette.types import Receive, Send

from tenure.core.errors import StoreError
from tenure.dashboard.watching import Listener, Watch

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
]
_BEAT_S = 0.25
_QUIET_S = 1.0
_CHECK_S = 2.0
_RETRY_MS = 1_000
STREAMS_MAX = 200
_PER_KEY_MAX = 20


Row = tuple[int, int, int, int, int]
"""A second: its time, and how many jobs were submitted, started, done and failed in it."""


class Series(msgspec.Struct, frozen=True):
    """The first frame: every second of the last quarter of an hour."""

    rows: list[Row]


class Tick(msgspec.Struct, frozen=True):
    """What happened since the last one: how many events, of which jobs (queue and id), seconds."""

    events: int
    moved: list[tuple[str, str]]
    rows: list[Row]
    now_ms: int


class Live:
    """Serves the stream, and ends all of them when the gateway goes."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._open: set[asyncio.Event] = set()
        self._by_key: Counter[str] = Counter()
        self._draining = False

    def drain(self) -> None:
        """Send everyone away; their browsers come back to whoever answers next."""
        self._draining = True
        for over in self._open:
            over.set()

    @property
    def is_full(self) -> bool:
        """Whether one more would be too many."""
        return self._draining or len(self._open) >= STREAMS_MAX

    def is_full_of(self, who: str) -> bool:
        """Whether a key has as many open as it may; the local caller without one has no limit."""
        return bool(who) and self._by_key[who] >= _PER_KEY_MAX

    async def serve(
        self,
        queue: str,
        receive: Receive,
        send: Send,
        is_still_in: Callable[[], Awaitable[bool]],
        *,
        who: str = "",
    ) -> None:
        """Write the stream until the page is closed, its reader signs out or the gateway goes."""
        over = asyncio.Event()
        self._open.add(over)
        self._by_key[who] += 1
        listener = self._watch.listen()
        ends = [_until_gone(receive, over), _until_out(is_still_in, over)]
        waiting = [asyncio.create_task(end) for end in ends]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await self._write(queue, listener, over, send)
            await send({"type": "http.response.body"})
        finally:
            for wait in waiting:
                wait.cancel()
            self._watch.leave(listener)
            self._open.discard(over)
            self._by_key[who] -= 1
            if not self._by_key[who]:
                del self._by_key[who]

    async def _write(self, queue: str, listener: Listener, over: asyncio.Event, send: Send) -> None:
        series = self._watch.series(queue)
        sent_s = series[-1][0] if series else 0
        first = b"retry: %d\n" % _RETRY_MS + _frame("series", Series(series))
        await send({"type": "http.response.body", "body": first, "more_body": True})
        while not over.is_set():
            await _either(listener.event, over, _QUIET_S)
            self._watch.touch()
            count, moved = listener.take()
            rows = [row for row in self._watch.series(queue, span_s=5) if row[0] > sent_s]
            sent_s = rows[-1][0] if rows else sent_s
            tick = Tick(count, moved, rows, int(time.time() * 1e3))
            frame = _frame("tick", tick)
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            await _either(None, over, _BEAT_S)


def _frame(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


async def _either(event: asyncio.Event | None, over: asyncio.Event, most_s: float) -> None:
    """Wait for news, for the end, or for the time."""
    waits = [asyncio.create_task(each.wait()) for each in (event, over) if each is not None]
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _until_out(is_still_in: Callable[[], Awaitable[bool]], over: asyncio.Event) -> None:
    while not over.is_set():
        await asyncio.sleep(_CHECK_S)
        with contextlib.suppress(StoreError):  # a store that is away says nothing of a session
            if not await is_still_in():
                over.set()


async def _until_gone(receive: Receive, over: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    over.set()
