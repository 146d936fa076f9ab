"""What the Redis client is built on: URLs, the wire format, one connection, and reconnecting."""

from __future__ import annotations

import asyncio
import random
import re
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import hiredis

from tenure.core.errors import ReplyLost, ServerError, StoreError, StoreUnreachable, UsageError

# -- URLs ------------------------------------------------------------------------------------------

_TCP = {"redis": False, "rediss": True}
_UNIX = {"unix", "redis+unix"}
_TLS_OPTIONS = {"cafile", "certfile", "keyfile"}
_FORMS = (
    "redis://host:6379/0, rediss://host:6379/0?cafile=ca.pem or redis+unix:///path/to/socket?db=0"
)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed Redis URL; `path` is set for a unix socket, `host` and `port` otherwise."""

    host: str = ""
    port: int = 6379
    path: str = ""
    db: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    cafile: str = ""
    certfile: str = ""
    keyfile: str = ""

    @property
    def label(self) -> str:
        """The address without credentials, for errors and logs."""
        if self.path:
            return f"redis+unix://{self.path}?db={self.db}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.db}"

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS settings of this address, None without TLS."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.cafile or None)
            if self.certfile:
                context.load_cert_chain(self.certfile, self.keyfile or None)
        except OSError as error:
            raise UsageError(
                f"{self.label}: the TLS files of this URL cannot be used: {error}"
            ) from error
        return context

    def greeting(self, client_name: str) -> list[tuple[Arg, ...]]:
        """The commands that open a connection."""
        commands: list[tuple[Arg, ...]] = []
        if self.password or self.user:
            commands.append(("AUTH", *([self.user] if self.user else ()), self.password))
        if self.db:
            commands.append(("SELECT", self.db))
        return [*commands, ("CLIENT", "SETNAME", client_name)]


def parse_address(url: str) -> RedisAddress:
    """Parse a Redis URL; raises UsageError, whose message never contains the password.

    redis://[user[:password]@]host[:port][/db]
    rediss://...?cafile=ca.pem&certfile=client.pem&keyfile=client.key      (TLS)
    redis+unix:///path/to/socket?db=0        unix:///path/to/socket
    """
    try:
        parts = urlsplit(url)
        options = dict(
            parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        )
        port = parts.port
    except ValueError:
        # The parser's message may contain the password.
        raise UsageError(f"this Redis URL cannot be read; expected {_FORMS}") from None
    scheme, in_path = parts.scheme, parts.path.strip("/")
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    if scheme in _UNIX:
        _check_options(options, {"db"})
        if not in_path:
            raise UsageError(f"a {scheme}:// URL needs the socket's path; expected {_FORMS}")
        db = _database(options.get("db", ""))
        return RedisAddress(path=unquote(parts.path), db=db, user=user, password=password)
    if scheme not in _TCP:
        raise UsageError(f"{scheme or 'an empty scheme'}: not a Redis URL; expected {_FORMS}")
    tls = _TCP[scheme]
    _check_options(options, {"db"} | (_TLS_OPTIONS if tls else set()))
    if in_path and "db" in options:
        raise UsageError("a Redis URL names its database once: either /0 or ?db=0")
    if "keyfile" in options and "certfile" not in options:
        raise UsageError("a Redis URL with keyfile needs certfile as well")
    db = _database(in_path or options.pop("db", ""))
    return RedisAddress(
        host=parts.hostname or "localhost",
        port=6379 if port is None else port,
        db=db,
        user=user,
        password=password,
        tls=tls,
        **options,
    )


def _check_options(options: dict[str, str], known: set[str]) -> None:
    unknown = sorted(options.keys() - known)
    if unknown:
        names = ", ".join(sorted(known))
        raise UsageError(f"unknown option {unknown[0]!r} in the Redis URL; known here: {names}")


def _database(text: str) -> int:
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UsageError(
            f"{text[:20]!r} is not a Redis database number; expected a number such as 0"
        )
    return int(text)


# -- the wire format -------------------------------------------------------------------------------

Arg = bytes | str | int | float

MORE: Final = object()
"""What a parser from `reply_reader` returns when it needs more bytes."""

# A server that answers with one of these has executed nothing, so it counts as unreachable.
_NOT_READY = {
    "LOADING": "it is still loading its data",
    "MASTERDOWN": "it is a replica that lost its primary",
    "CLUSTERDOWN": "its cluster is down",
    "READONLY": "it is a read-only replica, and the URL must name the primary",
    "UNBLOCKED": "it became a replica while a command waited",
}
# Servers before Redis 7 put a prefix before the error of a command in a script.
_IN_SCRIPT = re.compile(r"^ERR Error .*-(READONLY|MASTERDOWN|CLUSTERDOWN) ")
_REMEDIES = {
    "WRONGTYPE": "another program wrote a value of another type under a key of this queue",
    "MISCONF": "the server cannot save to its disk and refuses writes: see its log",
    "OOM": "the server is at its maxmemory: raise it or remove data; nothing was written",
    "NOAUTH": "the server wants a password: put it into the URL, redis://user:password@host",
    "WRONGPASS": "the user or the password in the URL is wrong",
    "NOPERM": "the user in the URL lacks the right to do this: see ACL SETUSER",
    "MOVED": "this is a Redis Cluster: Tenure needs one primary that holds all keys",
    "CROSSSLOT": "this is a Redis Cluster: Tenure needs one primary that holds all keys",
    "BUSY": "a script has been running for too long: SCRIPT KILL on the server ends it",
}


def encode(args: Sequence[Arg]) -> bytes:
    """One command as bytes; None, bool and nested values raise UsageError."""
    if not args:
        # Redis does not answer an empty command, so all later replies would be shifted by one.
        raise UsageError("an empty Redis command; expected its name and arguments")
    try:
        packed: bytes = hiredis.pack_command(tuple(args))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{command_name(args)}: not a Redis command ({error}); "
            f"arguments are str, bytes, int or float"
        ) from None
    return packed


def command_name(args: Sequence[Arg]) -> str:
    """The command's name for messages, without its arguments, which may be secret."""
    name = args[0] if args else ""
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def reply_reader() -> hiredis.Reader:
    """A parser whose `gets()` returns `MORE` or a reply; an error reply is a StoreError."""
    return hiredis.Reader(replyError=error_from_reply, notEnoughData=MORE)


def error_from_reply(text: str) -> StoreError:
    """The error for an error reply; its message says what an operator can do about it."""
    word = text.partition(" ")[0]
    if word == "ERR" and (inner := _IN_SCRIPT.match(text)):
        word = inner[1]
    if word in _NOT_READY:
        return StoreUnreachable(f"Redis is not ready: {_NOT_READY[word]}", reply=text)
    if text.startswith("ERR max number of clients"):
        return StoreUnreachable("Redis takes no more clients: raise its maxclients", reply=text)
    remedy = _REMEDIES.get(word)
    return ServerError(f"Redis answered: {text}" + (f" ({remedy})" if remedy else ""), reply=text)


def is_no_script(error: ServerError) -> bool:
    """Whether the server does not have the script. Then nothing was executed."""
    return isinstance(error.reply, str) and error.reply.startswith("NOSCRIPT")


def is_wrong_type(error: ServerError) -> bool:
    """Whether a key holds a value of another type than the command or script works on."""
    return isinstance(error.reply, str) and "WRONGTYPE" in error.reply


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


# -- connecting ------------------------------------------------------------------------------------

_PAUSE_MS_FIRST = 50
_PAUSE_MS_MAX = 1_000
_FORGET_FAILURES_S = 3.0


class Connector:
    """Opens connections to one address, with exponential backoff and jitter after failures.

    The first attempt after a lost connection is immediate. A connection that was closed because its
    server was not ready counts as a failure too.
    """

    def __init__(
        self, address: RedisAddress, *, name: str, timeout_ms: int, connect_timeout_ms: int
    ) -> None:
        self._address = address
        self._name = "".join(c if "!" <= c <= "~" else "-" for c in name) or "tenure"
        self._timeout_ms = timeout_ms
        self._connect_timeout_ms = connect_timeout_ms
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
            return await self._attempt()
        except StoreError:
            self.back_off()
            raise

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

    async def _attempt(self) -> Connection:
        address, loop = self._address, asyncio.get_running_loop()
        connection = Connection(address.label, self._timeout_ms)
        try:
            async with asyncio.timeout(self._connect_timeout_ms / 1000):
                if address.path:
                    await loop.create_unix_connection(lambda: connection, address.path)
                else:
                    await loop.create_connection(
                        lambda: connection, address.host, address.port, ssl=address.tls_context()
                    )
                await self._greet(connection)
        except TimeoutError:
            connection.drop("too slow to connect")
            raise StoreUnreachable(
                f"{address.label}: no connection within {self._connect_timeout_ms} ms"
            ) from None
        except OSError as error:
            connection.drop("could not connect")
            raise StoreUnreachable(f"{address.label}: cannot connect: {error}") from error
        except BaseException:
            connection.drop("gave up connecting")
            raise
        return connection

    async def _greet(self, connection: Connection) -> None:
        """AUTH, SELECT and CLIENT SETNAME in one write."""
        commands = self._address.greeting(self._name)
        try:
            replies = await connection.send_many([encode(command) for command in commands])
        except StoreError as error:
            # Only the greeting was sent, so for the caller this is "could not connect".
            raise StoreUnreachable(f"{error}".partition(";")[0]) from None
        for command, reply in zip(commands, replies, strict=True):
            check_greeting(self._address.label, str(command[0]), reply)


def check_greeting(label: str, command: str, reply: Any) -> None:
    """Raise the error reply to a command of `RedisAddress.greeting`, unless it is harmless."""
    if isinstance(reply, StoreUnreachable):
        raise StoreUnreachable(f"{label}: {reply}", operation=command, reply=reply.reply)
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
