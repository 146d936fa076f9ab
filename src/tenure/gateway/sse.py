"""Server-sent events: the frames, the buffer of one client, and the HTTP response."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from tenure.core.endpoint import Caller, Follow
from tenure.core.errors import StoreError
from tenure.core.job import JobEvent
from tenure.core.values import answer_json
from tenure.gateway.auth import CACHE_S, Auth
from tenure.gateway.limits import StreamLimit
from tenure.gateway.metrics import Metrics
from tenure.gateway.problems import Problem

HEARTBEAT = b": heartbeat\n\n"
_LINE_ENDS = str.maketrans("\r\n\0", "   ")


class Hello(msgspec.Struct, frozen=True):
    """The `data` of the first frame."""

    job_id: str
    status: str


def hello(job_id: str, state: str, retry_ms: int) -> bytes:
    """The first frame: whose events these are, and how soon to come back after a break."""
    data = msgspec.json.encode(Hello(job_id, state))
    return b"retry: %d\nevent: hello\ndata: %b\n\n" % (retry_ms, data)


def frame(event: JobEvent) -> bytes:
    """One event. Its id is the position from which a client goes on."""
    return b"id: %b\n%b" % (event.event_id.encode(), unnumbered(event))


def unnumbered(event: JobEvent) -> bytes:
    """One event that the job's own stream does not hold: it moves nobody's position."""
    news = {"type": event.type, "ts": event.ts_ms, "step": event.step, "data": _data(event.data)}
    name = event.type.translate(_LINE_ENDS).encode()
    return b"event: %b\ndata: %b\n\n" % (name, msgspec.json.encode(news))


def comment(text: str, *, retry_ms: int = 0) -> bytes:
    """A line for people who watch the wire; with `retry_ms`, when to come back."""
    retry = b"retry: %d\n" % retry_ms if retry_ms else b""
    return b"%b: %b\n\n" % (retry, text.translate(_LINE_ENDS).encode())


def position(event_id: str) -> tuple[int, ...]:
    """An event id as something that can be compared.

    >>> position("1700000000000-10") > position("1700000000000-9") > position("")
    True
    """
    return tuple(int(part) for part in event_id.split("-")) if event_id else ()


def _data(raw: bytes) -> object:
    """Made anew, because a frame must have no line break and must be JSON."""
    return answer_json(raw) if raw else {}


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
        self.pushed_s = now_s
        self.on_overflow: Callable[[], object] | None = None
        self._bytes_max = bytes_max
        self._catch_up = catch_up
        self._chunks: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None

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


_log = structlog.get_logger("tenure.gateway")

ABORT = "tenure.abort"  # ASGI extension of our server: drop the connection, unsent bytes and all
HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
]
_LAST_WORDS_S = 5.0
_REVOKED = comment("the key of this connection is no longer valid")


class EventSource(Protocol):
    """Where the events of a job come from: the feed of its queue."""

    def subscribe(self, job_id: str, after: str, *, masked: bool = False) -> Subscriber:
        """A new follower of a job."""

    def leave(self, subscriber: Subscriber) -> None:
        """Forget it."""


class Streamer:
    """Serves event streams and knows all that are open."""

    def __init__(self, auth: Auth, metrics: Metrics, *, retry_ms: int) -> None:
        self._auth = auth
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
        self,
        feed: EventSource,
        follow: Follow,
        caller: Caller,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Write the stream until the job ends, the client leaves, or the gateway does."""
        if self._draining:
            await self._turn_away(scope, send)
            return
        with self._limit.slot(caller.requester, self._auth.quota(caller.requester).streams):
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
            await asyncio.sleep(CACHE_S / 2)
            for caller in list(self._open):
                try:
                    valid = await self._auth.is_valid(caller)
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
