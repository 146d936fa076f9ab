"""Event streams of jobs: the events that clients get, the buffer of one client, the HTTP response.

`core.encoding` makes the bytes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from tenure.core.encoding import answer_json, sse_comment, sse_frame
from tenure.core.endpoint import Caller, Follow
from tenure.core.errors import StoreError
from tenure.core.job import JobEvent, JobRecord, position
from tenure.dashboard.api import until_disconnected
from tenure.gateway.auth import CACHE_S, Auth
from tenure.gateway.limits import StreamLimit
from tenure.gateway.metrics import Metrics
from tenure.gateway.problems import Problem

ABORT = "tenure.abort"  # ASGI extension of our server: drop the connection with unsent bytes
_HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
]
_ABORT_AFTER_S = 5.0
HEARTBEAT = sse_comment("heartbeat")


class Hello(msgspec.Struct, frozen=True):
    """The `data` of the first frame."""

    job_id: str
    status: str


def hello(job_id: str, state: str, retry_ms: int) -> bytes:
    """The first frame: the job, and the time after which to reconnect."""
    return sse_frame("hello", Hello(job_id, state), retry_ms=retry_ms)


def frame(event: JobEvent) -> bytes:
    """One event. Its id is the position from which a client resumes."""
    return sse_frame(event.type, _shown(event), event_id=event.event_id)


def frame_without_id(event: JobEvent) -> bytes:
    """One event without a position: the job's event stream does not contain it."""
    return sse_frame(event.type, _shown(event))


def _shown(event: JobEvent) -> dict[str, object]:
    # Decoded, to be encoded again: the data of a frame is JSON without line breaks.
    data = answer_json(event.data) if event.data else {}
    return {"type": event.type, "ts": event.ts_ms, "step": event.step, "data": data}


GONE = frame_without_id(
    JobEvent(event_id="", type="expired", ts_ms=0, step="gateway.expired")
) + sse_comment("the job has expired")
_UNREADABLE = sse_comment("the events of this job cannot be read")
_TOO_SLOW = sse_comment("you read too slowly; reconnect and go on from your Last-Event-ID")


class Subscriber:
    """The bounded buffer of frames for one client.

    A subscriber first catches up from its own position, as fast as its client reads. Then it is
    live, and the feed pushes to it. A live client that reads too slowly is disconnected and can
    resume with Last-Event-ID. `next` is for the one task that writes to the client.
    """

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
        "origin",
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
        self.origin: tuple[str, int] | None = None
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
        """Whether the buffer is over its limit, at which a live client is disconnected."""
        return self._size > self._bytes_max

    def push(self, chunk: bytes) -> None:
        """Add bytes to the buffer; too many of them end a live subscriber."""
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

    def take(self, event: JobEvent, *, at: tuple[int, ...], last: bool) -> bool:
        """Add one event, in a frame of its own."""
        return self.event(event, frame(event), at=at, last=last)

    def finish(self, last: JobEvent | None) -> None:
        """End the stream with an event that has no position, or because it cannot be read."""
        if last is None:
            self.end(_UNREADABLE)
        else:
            self.end(GONE if last.type == "expired" else frame_without_id(last))

    def event(self, event: JobEvent, framed: bytes, *, at: tuple[int, ...], last: bool) -> bool:
        """Add one event unless it was added before; `last` ends the stream after it."""
        if self.ended or at <= self.cursor:
            return False
        self.cursor = at
        self.event_id = event.event_id
        self.push(framed)
        if last:
            self.end()
        return True

    def end(self, chunk: bytes = b"") -> None:
        """End the stream after the buffered bytes and `chunk`."""
        if self.ended:
            return
        if chunk:
            self._chunks.append(chunk)
        self.ended = True
        self._wake()

    async def next(self) -> bytes | None:
        """All buffered bytes, waiting for the first; None when the stream has ended."""
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


def end_others(subscribers: Iterable[Subscriber], record: JobRecord | None) -> None:
    """End the subscribers whose job is gone, or whose id now belongs to another job."""
    for subscriber in list(subscribers):
        if subscriber.origin not in (None, record.origin if record else ()):
            subscriber.end(GONE)


async def end_replaced(
    get: Callable[[str], Awaitable[JobRecord | None]], subscribers: Iterable[Subscriber]
) -> None:
    """The same for jobs that `get` reads, if their subscribers have an origin.

    Called after events were read and before they are delivered: after the removal of a job another
    requester may use its id, and the events of that job are not for the followers of the first.
    """
    followers: dict[str, list[Subscriber]] = {}
    for subscriber in subscribers:
        if subscriber.origin is not None and not subscriber.ended:
            followers.setdefault(subscriber.job_id, []).append(subscriber)
    records = await asyncio.gather(*map(get, followers), return_exceptions=True)
    for record, those in zip(records, followers.values(), strict=True):
        if isinstance(record, StoreError):
            raise record
        # The owner of a job that cannot be read is unknown.
        end_others(those, record if isinstance(record, JobRecord) else None)


_REVOKED = sse_comment("the key of this connection is no longer valid")


class EventSource(Protocol):
    """What a stream needs of the feed of a queue."""

    def subscribe(
        self,
        job_id: str,
        after: str,
        *,
        masked: bool = False,
        origin: tuple[str, int] | None = None,
    ) -> Subscriber:
        """A new subscriber of a job."""

    def leave(self, subscriber: Subscriber) -> None:
        """Remove a subscriber."""


class Streamer:
    """Serves event streams; ends them when their key is revoked or the gateway shuts down."""

    def __init__(self, auth: Auth, metrics: Metrics, *, retry_ms: int) -> None:
        self._auth = auth
        self._metrics = metrics
        self._limit = StreamLimit()
        self._retry_ms = retry_ms
        self._open: dict[Caller, set[Subscriber]] = {}
        self._draining = False
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to check the keys of open streams."""
        self._watch = asyncio.create_task(self._watch_keys())

    async def close(self) -> None:
        """Stop the checks."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    def drain(self) -> None:
        """End all streams; the clients reconnect at random times."""
        self._draining = True
        for subscribers in self._open.values():
            for subscriber in list(subscribers):
                subscriber.end(self._restarting())

    async def serve(
        self,
        feed: EventSource,
        follow: Follow,
        caller: Caller,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Write the stream until the job ends, the client disconnects, or the gateway drains."""
        if self._draining:
            await self._refuse(scope, send)
            return
        with self._limit.slot(caller.requester, self._auth.quota(caller.requester).streams):
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body"})
                return
            subscriber = feed.subscribe(
                follow.job_id, follow.after, masked=follow.masked, origin=follow.origin
            )
            timers: list[asyncio.TimerHandle] = []
            subscriber.on_overflow = lambda: self._drop(scope, timers)
            streams = self._open.setdefault(caller, set())
            streams.add(subscriber)
            self._metrics.sse_clients.inc()
            watcher = asyncio.create_task(_end_when_disconnected(receive, subscriber))
            try:
                await _write(subscriber, hello(follow.job_id, follow.state, self._retry_ms), send)
            finally:
                watcher.cancel()
                for timer in timers:
                    timer.cancel()
                self._metrics.sse_clients.dec()
                feed.leave(subscriber)
                streams.discard(subscriber)
                if not streams:
                    self._open.pop(caller, None)

    async def _refuse(self, scope: Scope, send: Send) -> None:
        """A browser does not reconnect after an error status, so it gets an empty stream."""
        if (b"accept", b"text/event-stream") not in scope["headers"]:
            raise Problem("draining", retry_after_s=1)
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": self._restarting()})

    def _restarting(self) -> bytes:
        retry_ms = random.randint(self._retry_ms // 4, self._retry_ms)
        return sse_comment("the gateway is restarting", retry_ms=retry_ms)

    def _drop(self, scope: Scope, timers: list[asyncio.TimerHandle]) -> None:
        """Give a client that reads too slowly five seconds for the last bytes, then abort."""
        self._metrics.sse_dropped.inc()
        abort = scope.get("extensions", {}).get(ABORT)
        if abort is not None:
            timers.append(asyncio.get_running_loop().call_later(_ABORT_AFTER_S, abort))

    async def _watch_keys(self) -> None:
        while True:
            await asyncio.sleep(CACHE_S / 2)
            for caller in list(self._open):
                try:
                    valid = await self._auth.is_valid(caller)
                except StoreError:
                    continue  # the store of this key is unreachable
                if not valid:
                    for subscriber in list(self._open.get(caller, ())):
                        subscriber.end(_REVOKED)


async def _write(subscriber: Subscriber, first: bytes, send: Send) -> None:
    await send({"type": "http.response.body", "body": first, "more_body": True})
    while (chunk := await subscriber.next()) is not None:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body"})


async def _end_when_disconnected(receive: Receive, subscriber: Subscriber) -> None:
    await until_disconnected(receive)
    subscriber.end()
