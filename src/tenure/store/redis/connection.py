"""What the Redis client is built on: one connection, dialling, one server."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import hiredis

from tenure.core.errors import ReplyLost, ServerError, StoreError, StoreUnreachable
from tenure.store.redis.address import Arg, RedisAddress
from tenure.store.redis.wire import MORE, UNREADABLE, encode, reply_reader
from tenure.store.resend import run_step

T = TypeVar("T")

# -- one connection --------------------------------------------------------------------------------

_WRITE_BUFFER_MAX = 1 << 20
# A long reply may still be arriving, or the event loop was blocked and has not read it yet. So a
# reply is overdue only if no bytes arrived between two checks.
_SECOND_CHECK_S = 0.25


class _Pipeline:
    """A pipeline's entry in the reply queue: collects its replies; errors are values."""

    __slots__ = ("future", "missing", "replies")

    def __init__(self, future: asyncio.Future[list[Any]], count: int) -> None:
        self.future = future
        self.missing = count
        self.replies: list[Any] = []

    def add(self, reply: Any) -> None:
        self.replies.append(reply)
        self.missing -= 1
        if not self.missing and not self.future.done():
            self.future.set_result(self.replies)


class Connection(asyncio.Protocol):
    """An open connection: commands are sent in order, replies come back in order.

    Commands of one turn of the event loop are sent in one write. A cancelled caller keeps its place
    in the reply queue, so that its reply is dropped and not given to the next caller.

    A connection fails as a whole and for good (`lost`). A command that was written to the socket
    may have been executed, and fails with ReplyLost; others fail with StoreUnreachable. Nothing is
    sent twice. If a server answers that it is not ready or not the primary, the connection is
    closed (`not_ready`), because its name may resolve to another server the next time.
    """

    def __init__(self, label: str, timeout_ms: int) -> None:
        self.label = label
        self.timeout_ms = timeout_ms
        self.lost = False
        self.not_ready = ""
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._reader = reply_reader()
        self._waiting: deque[asyncio.Future[Any] | _Pipeline] = deque()
        self._outbox: list[bytes] = []
        self._paused = False
        self._written = 0  # commands handed to the socket since the start
        self._answered = 0
        self._received = 0  # chunks of bytes; grows while a long reply arrives
        self._received_at_first_check = -1
        self._deadlines: deque[tuple[int, float]] = deque()  # (commands written, their deadline)
        self._timer: asyncio.TimerHandle | None = None

    def send(self, packed: bytes) -> asyncio.Future[Any]:
        """Queue one encoded command; the future has its reply or its error."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._queue(packed)
        self._waiting.append(future)
        return future

    def send_many(self, packed: Sequence[bytes]) -> asyncio.Future[list[Any]]:
        """Queue commands for one write; an error reply is a value."""
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        self._queue(b"".join(packed))
        self._waiting.extend([_Pipeline(future, len(packed))] * len(packed))
        return future

    def drop(self, reason: str) -> None:
        """Close the connection now; every pending call fails."""
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
        self._forget_answered()
        self._deadlines.append((self._written, self._loop.time() + self.timeout_ms / 1000))
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadlines[0][1], self._check_overdue)
        transport.write(data)

    def is_silent(self, for_s: float) -> bool:
        """Whether a command that was sent so long ago has no answer."""
        self._forget_answered()
        if self.lost or not self._deadlines:
            return False
        return self._deadlines[0][1] - self.timeout_ms / 1000 + for_s < self._loop.time()

    def _forget_answered(self) -> None:
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= self._answered:
            deadlines.popleft()

    def _check_overdue(self) -> None:
        """Fail the connection if the oldest write is overdue and no bytes arrive."""
        self._timer = None
        self._forget_answered()
        if not self._deadlines or self.lost:
            return
        deadline = self._deadlines[0][1]
        if self._loop.time() < deadline:
            self._timer = self._loop.call_at(deadline, self._check_overdue)
        elif self._received != self._received_at_first_check:
            self._received_at_first_check = self._received
            self._timer = self._loop.call_later(_SECOND_CHECK_S, self._check_overdue)
        else:
            self.drop(f"no answer within {self.timeout_ms} ms")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_MAX)
        self._transport = transport
        if self.lost:  # dropped while it was being opened
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += 1
        reader, waiting = self._reader, self._waiting
        try:
            reader.feed(data)
            reply = reader.gets()
            while reply is not MORE:
                entry = waiting.popleft()
                self._answered += 1
                if type(reply) is StoreUnreachable:
                    self.not_ready = str(reply)
                if type(entry) is _Pipeline:
                    entry.add(reply)
                elif not entry.done():  # type: ignore[union-attr]  # done: the caller was cancelled
                    _resolve(entry, reply)  # type: ignore[arg-type]
                reply = reader.gets()
            if self.not_ready:
                self.drop(self.not_ready)
        except hiredis.ProtocolError as error:
            self.drop(f"it does not speak the Redis protocol ({error})")
        except IndexError:
            self.drop(f"it sent a reply without a command ({reply!r:.200})")

    def pause_writing(self) -> None:
        # From now on commands stay in the outbox, so we know that they were not sent.
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
        sent = self._written - self._answered
        for index, entry in enumerate(self._waiting):
            future = entry.future if isinstance(entry, _Pipeline) else entry
            if future.done():
                continue
            what = f"{self.label}: {reason}; the command was "
            future.set_exception(
                ReplyLost(f"{what}sent and may have been executed")
                if index < sent
                else StoreUnreachable(f"{what}not sent")
            )
        self._waiting.clear()
        self._deadlines.clear()


def _resolve(future: asyncio.Future[Any], reply: Any) -> None:
    if isinstance(reply, StoreError):
        future.set_exception(reply)
    else:
        future.set_result(reply)


# -- dialling --------------------------------------------------------------------------------------

_PAUSE_MS_FIRST = 50
_PAUSE_MS_MAX = 1_000
_FORGET_FAILURES_S = 3.0
_ANSWER_WITHIN_S = 1.0


class Dialer:
    """Opens connections: TLS, login, database and the client's name."""

    def __init__(self, *, name: str, timeout_ms: int, connect_timeout_ms: int) -> None:
        self._name = "".join(c if "!" <= c <= "~" else "-" for c in name) or "tenure"
        self.timeout_ms = timeout_ms
        self.connect_timeout_ms = connect_timeout_ms

    async def dial(self, address: RedisAddress, *, primary_only: bool = False) -> Connection:
        """A new connection; `primary_only` refuses a server that is a replica."""
        login = (
            await asyncio.to_thread(address.login)
            if address.asks_for_login
            else (address.user, address.password)
        )
        commands = address.greeting(self._name, login)
        if primary_only:
            commands.append(("ROLE",))
        connection = Connection(address.label, self.timeout_ms)
        try:
            await self._open(connection, address)
            await _greet(connection, address, commands)
        except OSError as error:
            connection.drop("could not connect")
            hint = ""
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.CertificateError):
                hint = "; if this port does not speak TLS, write redis:// instead of rediss://"
            raise StoreUnreachable(f"{address.label}: cannot connect: {error}{hint}") from error
        except BaseException:
            connection.drop("gave up connecting")
            raise
        return connection

    async def ask(self, address: RedisAddress, *command: Arg) -> Any:
        """The answer to one command, on a connection of its own; an error reply is raised."""
        connection = await self.dial(address)
        try:
            return await connection.send(encode(command))
        finally:
            connection.drop("it was opened for one question")

    async def ask_first(
        self,
        asked: Iterable[RedisAddress],
        command: Sequence[Arg],
        read: Callable[[RedisAddress, Any], T],
    ) -> tuple[RedisAddress, T]:
        """The first answer of several servers that can be read, and who gave it."""
        refusals: list[str] = []
        for address in asked:
            try:
                async with asyncio.timeout(_ANSWER_WITHIN_S):
                    reply = await self.ask(address, *command)
                    if reply is not None:
                        return address, read(address, reply)
            except TimeoutError:
                refusals.append(f"{address.label}: no answer within {_ANSWER_WITHIN_S:g} s")
            except StoreError as error:
                refusals.append(str(error))
            except UNREADABLE:
                refusals.append(f"{address.label}: its answer cannot be read")
            else:
                refusals.append(f"{address.label}: it does not know the service")
        raise StoreUnreachable("; ".join(refusals) or "there is no server to ask")

    async def _open(self, connection: Connection, address: RedisAddress) -> None:
        loop = asyncio.get_running_loop()
        if address.path:
            await loop.create_unix_connection(lambda: connection, address.path)
            return
        await loop.create_connection(
            lambda: connection, address.host, address.port, ssl=address.tls_context()
        )


async def _greet(
    connection: Connection, address: RedisAddress, commands: Sequence[Sequence[Arg]]
) -> None:
    """AUTH, SELECT, CLIENT SETNAME and ROLE in one write."""
    try:
        replies = await connection.send_many([encode(command) for command in commands])
    except StoreError as error:
        # Only the greeting was sent, so for the caller this is "could not connect".
        hint = "" if address.tls or address.path else TLS_HINT
        raise StoreUnreachable(f"{error}".partition(";")[0] + hint) from None
    for command, reply in zip(commands, replies, strict=True):
        check_greeting(address.label, str(command[0]), reply)


TLS_HINT = "; if this port speaks TLS, write rediss:// instead of redis://"


def check_greeting(label: str, command: str, reply: Any) -> None:
    """Raise the error reply to a command of `RedisAddress.greeting`, unless it is harmless."""
    if isinstance(reply, StoreUnreachable):
        raise StoreUnreachable(f"{label}: {reply}", operation=command, reply=reply.reply)
    if command == "ROLE" and isinstance(reply, list) and reply[:1] != [b"master"]:
        role = reply[0].decode() if reply and isinstance(reply[0], bytes) else "server of no role"
        raise StoreUnreachable(f"{label}: it is a {role}, not the primary")
    if not isinstance(reply, ServerError):
        return
    text = str(reply.reply)
    if command == "AUTH":
        # Old servers quote the arguments of a command that they refuse: keep the first word only.
        word = text.partition(" ")[0]
        raise ServerError(
            f"{label}: the server refused the user and password of the URL ({word})",
            operation=command,
            reply=word,
        )
    # A user that may not set a client name may still use the server.
    if command == "SELECT" or text.startswith("NOAUTH"):
        raise ServerError(f"{label}: {reply}", operation=command, reply=text)


class Connector:
    """Opens connections to one server, with exponential backoff and jitter after failures.

    The first attempt after a lost connection is immediate. A connection that was closed because its
    server was not ready counts as a failure too. With `locate`, the server is looked up at every
    attempt, and must be a primary; `located` is the last one.
    """

    def __init__(
        self,
        dialer: Dialer,
        address: RedisAddress,
        locate: Callable[[], Awaitable[RedisAddress]] | None = None,
    ) -> None:
        self._dialer = dialer
        self._address = address
        self._locate = locate
        self.located: RedisAddress | None = None
        self._failures = 0
        self._not_before_s = float("-inf")
        self._shared: asyncio.Task[Connection] | None = None

    async def connect_shared(self) -> Connection:
        """A new connection; callers that come while it is being opened get the same one."""
        if self._shared is None:
            self._shared = asyncio.create_task(self.connect())
            self._shared.add_done_callback(self._shared_is_done)
        attempt = self._shared
        try:
            # Shielded, so that a cancelled caller does not cancel the attempt for the others.
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if attempt.cancelled() and not (caller and caller.cancelling()):
                raise StoreUnreachable(f"{self._address.label}: the client was closed") from None
            raise

    async def connect(self) -> Connection:
        """A new connection for the caller alone."""
        await asyncio.sleep(max(0.0, self._not_before_s - asyncio.get_running_loop().time()))
        try:
            async with asyncio.timeout(self._dialer.connect_timeout_ms / 1000):
                if self._locate is None:
                    return await self._dialer.dial(self._address)
                return await self._dial_located(self._locate)
        except TimeoutError:
            self.back_off()
            hint = "; a port that does not speak TLS does this too" if self._address.tls else ""
            raise StoreUnreachable(
                f"{self._address.label}: no connection within "
                f"{self._dialer.connect_timeout_ms} ms{hint}"
            ) from None
        except StoreError:
            self.back_off()
            raise

    async def _dial_located(self, locate: Callable[[], Awaitable[RedisAddress]]) -> Connection:
        address = self.located = await locate()
        connection = await self._dialer.dial(address, primary_only=True)
        if self.located != address:
            connection.drop("another primary was named")
            raise StoreUnreachable(f"{address.label}: another primary took its place")
        return connection

    def back_off(self) -> None:
        """The last connection failed: wait before the next one, longer each time."""
        now = asyncio.get_running_loop().time()
        if now - self._not_before_s > _FORGET_FAILURES_S:
            self._failures = 0
        pause_ms = min(_PAUSE_MS_MAX, _PAUSE_MS_FIRST << min(self._failures, 10))
        self._failures += 1
        self._not_before_s = now + pause_ms * random.uniform(0.5, 1.0) / 1000

    async def cancel(self) -> None:
        """Cancel a shared attempt; its callers get StoreUnreachable."""
        task = self._shared
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def _shared_is_done(self, task: asyncio.Task[Connection]) -> None:
        self._shared = None
        if not task.cancelled():
            task.exception()  # retrieved, even if every caller was cancelled


# -- one server ------------------------------------------------------------------------------------

_CLOSE_WITHIN_S = 1.0


class Node:
    """A client's connections to one server: `main`, which all calls share, and those that block."""

    def __init__(self, connector: Connector, timeout_ms: int) -> None:
        self.connector = connector
        self.main: Connection | None = None
        self._timeout_ms = timeout_ms
        self._blocking: set[Connection] = set()
        self._idle: list[Connection] = []
        self._closed = False

    async def ready(self) -> Connection:
        """The shared connection, opened anew if it is lost."""
        if self.main is None or self.main.lost:
            if self.main is not None and self.main.not_ready:
                self.main.not_ready = ""
                self.connector.back_off()
            self.main = await self.connector.connect_shared()
        return self.main

    @property
    def is_lost(self) -> bool:
        """Whether the shared connection broke and was not opened again."""
        return self.main is not None and self.main.lost

    def is_silent(self, for_s: float) -> bool:
        """Whether a call waits so long for its answer, beyond the time that it blocks itself."""
        return any(
            each.is_silent(for_s + (each.timeout_ms - self._timeout_ms) / 1000)
            for each in self._connections()
        )

    async def block(
        self, packed: Sequence[bytes], wait_ms: int, behind: Sequence[bytes] = ()
    ) -> list[Any]:
        """The replies to commands, of which one blocks for `wait_ms`; errors are values.

        Commands `behind` follow on the same connection if none of the others failed.
        """
        connection = await self._blocking_connection()
        connection.timeout_ms = wait_ms + self._timeout_ms
        try:
            replies = await connection.send_many(packed)
            if behind and not any(isinstance(reply, StoreError) for reply in replies):
                replies += await run_step(connection.send_many(behind), executed_before=True)
        except BaseException:
            connection.drop("the caller of a blocking command was cancelled")
            self._blocking.discard(connection)
            raise
        self._idle.append(connection)
        return replies

    async def _blocking_connection(self) -> Connection:
        """A connection for one blocking command: an idle one, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost:
                return connection
            self._blocking.discard(connection)
            if connection.not_ready:
                self.connector.back_off()
        connection = await self.connector.connect()
        if self._closed:
            connection.drop("the client was closed")
            raise StoreUnreachable(f"{connection.label}: the client was closed")
        self._blocking.add(connection)
        return connection

    def drop(self, reason: str) -> None:
        """Close all connections now; pending calls fail, later ones dial again."""
        for connection in self._connections():
            connection.drop(reason)

    async def close(self) -> None:
        """Close all connections for good."""
        self._closed = True
        await self.connector.cancel()
        connections = self._connections()
        self.drop("the client was closed")
        self.main = None
        self._blocking.clear()
        self._idle.clear()
        if connections:
            await asyncio.wait([c.closed for c in connections], timeout=_CLOSE_WITHIN_S)

    def _connections(self) -> list[Connection]:
        return [*self._blocking, *([self.main] if self.main else [])]
