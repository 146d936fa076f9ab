"""One connection to Redis: commands go out in order, replies come back in order.

Commands of one turn of the event loop leave in one write. Replies meet their futures in a queue;
a caller that has gone away leaves its place there, so that its reply is swallowed in order.

A connection fails as a whole. Whatever was handed to the socket may have been executed and fails
with ReplyLost; what still waited here was certainly not and fails with StoreUnreachable. Nothing is
ever sent twice. One timer a connection watches the oldest unanswered write.

A server that answers that it is not ready, or not the primary any more, is left (`left`): behind
its name another one may stand by the time of the next connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import hiredis

from tenure.core.errors import ReplyLost, StoreError, StoreUnreachable
from tenure.store.wire import MORE, reply_reader

_WRITE_BUFFER_MAX = 1 << 20
# A long reply may be on its way in pieces, and a loop that was blocked may not have read what has
# long arrived: a reply is overdue when nothing at all was heard between two looks.
_SECOND_LOOK_S = 0.25


class _Gather:
    """The place of a pipeline in the queue: collects its replies, errors included, as values."""

    __slots__ = ("future", "missing", "replies")

    def __init__(self, future: asyncio.Future[list[Any]], count: int) -> None:
        self.future = future
        self.missing = count
        self.replies: list[Any] = []

    def take(self, reply: Any) -> None:
        self.replies.append(reply)
        self.missing -= 1
        if not self.missing and not self.future.done():
            self.future.set_result(self.replies)


class Connection(asyncio.Protocol):
    """An open connection; `lost` turns True once and for ever. Made by `dial`."""

    def __init__(self, label: str, patience_ms: int) -> None:
        self.label = label
        self.patience_ms = patience_ms
        self.lost = False
        self.left = ""
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._reader = reply_reader()
        self._waiting: deque[asyncio.Future[Any] | _Gather] = deque()
        self._outbox: list[bytes] = []
        self._paused = False
        self._written = 0  # commands handed to the socket since the start
        self._answered = 0
        self._heard = 0  # pieces received; grows while a long reply arrives
        self._heard_at_first_look = -1
        self._marks: deque[tuple[int, float]] = deque()  # (commands written, their deadline)
        self._timer: asyncio.TimerHandle | None = None

    def send(self, packed: bytes) -> asyncio.Future[Any]:
        """Queues one encoded command; the future carries its reply, or raises its error."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._queue(packed)
        self._waiting.append(future)
        return future

    def send_many(self, packed: Sequence[bytes]) -> asyncio.Future[list[Any]]:
        """Queues commands that leave in one write; an error reply stands as a value."""
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        self._queue(b"".join(packed))
        gather = _Gather(future, len(packed))
        self._waiting.extend([gather] * len(packed))
        return future

    def drop(self, reason: str) -> None:
        """Ends the connection now; everybody who waits is told."""
        if self._transport is not None:
            self._transport.abort()
        self._fail(reason)

    def _queue(self, packed: bytes) -> None:
        if self.lost:
            raise StoreUnreachable(f"{self.label}: the connection is gone")
        if not self._outbox and not self._paused:
            self._loop.call_soon(self._flush)
        self._outbox.append(packed)

    def _flush(self) -> None:
        outbox, transport = self._outbox, self._transport
        if self._paused or not outbox or transport is None:
            return
        if transport.is_closing():
            self._fail("the connection was closed")
            return
        data = outbox[0] if len(outbox) == 1 else b"".join(outbox)
        outbox.clear()
        self._written = self._answered + len(self._waiting)
        self._mark()
        transport.write(data)

    # -- the overdue timer ----------------------------------------------------------------------

    def _mark(self) -> None:
        marks = self._marks
        while marks and marks[0][0] <= self._answered:
            marks.popleft()
        marks.append((self._written, self._loop.time() + self.patience_ms / 1000))
        if self._timer is None:
            self._timer = self._loop.call_at(marks[0][1], self._look)

    def _look(self) -> None:
        """Fails the connection when the oldest write is overdue and nothing at all arrives."""
        self._timer = None
        marks = self._marks
        while marks and marks[0][0] <= self._answered:
            marks.popleft()
        if not marks or self.lost:
            return
        if self._loop.time() < marks[0][1]:
            self._timer = self._loop.call_at(marks[0][1], self._look)
        elif self._heard != self._heard_at_first_look:
            self._heard_at_first_look = self._heard
            self._timer = self._loop.call_later(_SECOND_LOOK_S, self._look)
        else:
            self.drop(f"no answer within {self.patience_ms} ms")

    # -- what the transport tells us --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_MAX)
        self._transport = transport
        if self.lost:  # given up while it was being opened
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._heard += 1
        reader, waiting = self._reader, self._waiting
        try:
            reader.feed(data)
            reply = reader.gets()
            while reply is not MORE:
                place = waiting.popleft()
                self._answered += 1
                if type(reply) is StoreUnreachable:
                    self.left = str(reply)
                if type(place) is _Gather:
                    place.take(reply)
                elif not place.done():  # type: ignore[union-attr]  # done: the caller went away
                    _settle(place, reply)  # type: ignore[arg-type]
                reply = reader.gets()
            if self.left:
                self.drop(self.left)
        except hiredis.ProtocolError as error:
            self.drop(f"it does not speak the Redis protocol ({error})")
        except IndexError:
            self.drop(f"it sent something that nobody asked for ({reply!r:.200})")

    def pause_writing(self) -> None:
        # What is queued from here on stays with us, where it is known not to have been sent.
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection broke ({exc})" if exc else "the server closed the connection")
        if not self.closed.done():
            self.closed.set_result(None)

    def _fail(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._outbox.clear()
        in_doubt = self._written - self._answered
        for index, place in enumerate(self._waiting):
            future = place.future if isinstance(place, _Gather) else place
            if not future.done():
                future.set_exception(_loss(self.label, reason, sent=index < in_doubt))
        self._waiting.clear()
        self._marks.clear()


def _settle(future: asyncio.Future[Any], reply: Any) -> None:
    if isinstance(reply, StoreError):
        future.set_exception(reply)
    else:
        future.set_result(reply)


def _loss(label: str, reason: str, *, sent: bool) -> StoreError:
    if sent:
        return ReplyLost(f"{label}: {reason}; the command was sent and may have been executed")
    return StoreUnreachable(f"{label}: {reason}; the command was not sent")
