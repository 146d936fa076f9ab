"""A job's events as one HTTP response, written as bare ASGI messages.

The writer joins everything that waits into one write. A second small task learns that the client
has hung up. What a client may have open, and whether its key still holds, is looked after here.
"""

from __future__ import annotations

import asyncio
import random

import structlog
from starlette.types import Receive, Scope, Send

from tenure.core.endpoint import Caller, Follow
from tenure.core.errors import StoreError
from tenure.gateway.auth import BELIEVE_S, Door
from tenure.gateway.feed import Feed
from tenure.gateway.frames import comment, hello
from tenure.gateway.limits import StreamLimit
from tenure.gateway.metrics import Metrics
from tenure.gateway.problems import Problem
from tenure.gateway.subscriber import Subscriber

_log = structlog.get_logger("tenure.gateway")

ABORT = "tenure.abort"  # ASGI extension of our server: drop the connection, unsent bytes and all
HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
]
_LAST_WORDS_S = 5.0
_REVOKED = comment("the key of this connection is no longer valid")


class Streamer:
    """Serves event streams and knows all that are open."""

    def __init__(self, door: Door, metrics: Metrics, *, retry_ms: int) -> None:
        self._door = door
        self._metrics = metrics
        self._limit = StreamLimit()
        self._retry_ms = retry_ms
        self._open: dict[Caller, set[Subscriber]] = {}
        self._draining = False
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch for keys that are revoked while their streams are open."""
        self._watch = asyncio.create_task(self._watch_keys())

    async def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    def drain(self) -> None:
        """Send everyone away, and not all back at the same moment."""
        self._draining = True
        for subscribers in self._open.values():
            for subscriber in list(subscribers):
                subscriber.end(self._come_again())

    async def serve(
        self, feed: Feed, follow: Follow, caller: Caller, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Write the stream until the job ends, the client leaves, or the gateway does."""
        if self._draining:
            await self._turn_away(scope, send)
            return
        with self._limit.slot(caller.requester, self._door.quota(caller.requester).streams):
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body"})
                return
            subscriber = feed.subscribe(follow.job_id, follow.after, masked=follow.masked)
            timers: list[asyncio.TimerHandle] = []
            subscriber.on_overflow = lambda: self._drop(scope, timers)
            mine = self._open.setdefault(caller, set())
            mine.add(subscriber)
            self._metrics.sse_clients.inc()
            gone = asyncio.create_task(_until_gone(receive, subscriber))
            try:
                await _write(subscriber, hello(follow.job_id, follow.state, self._retry_ms), send)
            finally:
                gone.cancel()
                for timer in timers:
                    timer.cancel()
                self._metrics.sse_clients.dec()
                feed.leave(subscriber)
                mine.discard(subscriber)
                if not mine:
                    self._open.pop(caller, None)

    async def _turn_away(self, scope: Scope, send: Send) -> None:
        """A browser takes every answer but 200 for the last one: it gets a stream that ends."""
        if (b"accept", b"text/event-stream") not in scope["headers"]:
            raise Problem("draining", retry_after_s=1)
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": self._come_again()})

    def _come_again(self) -> bytes:
        retry_ms = random.randint(self._retry_ms // 4, self._retry_ms)
        return comment("the gateway is restarting", retry_ms=retry_ms)

    def _drop(self, scope: Scope, timers: list[asyncio.TimerHandle]) -> None:
        """A client that does not read gets a moment for the last words, then it is cut off."""
        self._metrics.sse_dropped.inc()
        abort = scope.get("extensions", {}).get(ABORT)
        if abort is not None:
            timers.append(asyncio.get_running_loop().call_later(_LAST_WORDS_S, abort))

    async def _watch_keys(self) -> None:
        while True:
            await asyncio.sleep(BELIEVE_S / 2)
            for caller in list(self._open):
                try:
                    valid = await self._door.is_valid(caller)
                except StoreError:
                    continue  # the store of this key is away; others answer
                if not valid:
                    for subscriber in list(self._open.get(caller, ())):
                        subscriber.end(_REVOKED)


async def _write(subscriber: Subscriber, first: bytes, send: Send) -> None:
    await send({"type": "http.response.body", "body": first, "more_body": True})
    while (chunk := await subscriber.next()) is not None:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body"})


async def _until_gone(receive: Receive, subscriber: Subscriber) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    subscriber.end()
