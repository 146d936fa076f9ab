"""A small HTTP client that connects to checked addresses only, and keeps connections for reuse.

It makes no decision for its caller: any status is an answer, redirects included. Deadlines are for
the whole exchange. Proxies and credentials of this machine's environment are not looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tenure.egress.connection import Connection
from tenure.egress.errors import Refused, TooLarge, Unreachable
from tenure.egress.guard import Guard
from tenure.egress.target import Target, read_target

_IDLE_S_MAX = 15.0
# A host that moved shall be looked up again even where its connections never idle.
_AGE_S_MAX = 120.0
_IDLE_TOTAL_MAX = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """How long an exchange may take in all, and how much of the answer is read."""

    connect_ms: int = 5_000
    total_ms: int = 15_000
    body_bytes_max: int = 16_384


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. Of a body over the limit only the beginning is here (`truncated`)."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer whose body is still to be read, piece by piece."""

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Body:
    """A request body that is sent in pieces; its length is said beforehand."""

    length: int
    pieces: AsyncIterable[bytes] = field(repr=False)


class Client:
    """One pool of connections; it belongs to the event loop that uses it."""

    def __init__(
        self,
        guard: Guard | None = None,
        *,
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._guard = guard or Guard()
        self._limits = limits or Limits()
        self._tls = tls
        self._idle: OrderedDict[Connection, tuple[str, str, int]] = OrderedDict()
        self._by_origin: dict[tuple[str, str, int], list[Connection]] = {}

    async def send(
        self,
        method: str,
        url: str,
        *,
        headers: Sequence[tuple[str, str]] = (),
        body: bytes = b"",
        limits: Limits | None = None,
    ) -> Response:
        """Make a request and read its answer, up to the byte limit."""
        bounds = limits or self._limits
        kept, size, truncated = [], 0, False
        async with self.open(method, url, headers=headers, body=body, limits=bounds) as answer:
            async for piece in answer.pieces:
                kept.append(piece[: bounds.body_bytes_max - size])
                size += len(piece)
                if size > bounds.body_bytes_max:
                    truncated = True  # the rest is not read: leaving early closes the connection
                    break
        return Response(answer.status, answer.headers, b"".join(kept), truncated)

    @asynccontextmanager
    async def open(
        self,
        method: str,
        url: str,
        *,
        headers: Sequence[tuple[str, str]] = (),
        body: bytes | Body = b"",
        limits: Limits | None = None,
    ) -> AsyncIterator[Answer]:
        """Make a request; inside the block its answer can be read piece by piece."""
        target = read_target(url)
        bounds = limits or self._limits
        connection: Connection | None = None
        try:
            async with asyncio.timeout(bounds.total_ms / 1000) as deadline:
                connection = await self._connected(target, bounds)
                await self._ask(connection, method, target, headers, body)
                yield Answer(connection.status, connection.headers, connection.pieces())
        except TimeoutError:
            if not deadline.expired():
                raise
            raise Unreachable(
                f"{target.origin} took longer than {bounds.total_ms / 1000:g} s"
            ) from None
        finally:
            if connection is not None:
                self._give_back(connection, target)

    async def close(self) -> None:
        """Hang up on everybody."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        self._by_origin.clear()
        await self._guard.close()

    async def _ask(
        self,
        connection: Connection,
        method: str,
        target: Target,
        headers: Sequence[tuple[str, str]],
        body: bytes | Body,
    ) -> None:
        length = body.length if isinstance(body, Body) else len(body)
        head = _head(method, target, headers, length)
        inline = body if isinstance(body, bytes) else b""
        await connection.start(head + inline, head_only=method == "HEAD")
        if isinstance(body, Body):
            await _send_pieces(connection, body)
        await connection.answered()

    async def _connected(self, target: Target, bounds: Limits) -> Connection:
        idle = self._by_origin.get(_key(target))
        now_s = asyncio.get_running_loop().time()
        while idle:
            connection = idle.pop()  # the youngest: the others may rest and be dropped
            del self._idle[connection]
            if connection.reusable and not _too_old(connection, now_s):
                return connection
            connection.close()
        return await self._dial(target, bounds)

    async def _dial(self, target: Target, bounds: Limits) -> Connection:
        """Connect to one of the addresses that the guard has just checked."""
        addresses = await self._guard.addresses(target)
        share_s = bounds.connect_ms / 1000 / len(addresses)
        problem = "no address"
        for address in addresses:
            try:
                async with asyncio.timeout(share_s):
                    return await self._connect(target, address)
            except TimeoutError:
                problem = "no answer in time"
            except ssl.SSLCertVerificationError as error:
                raise Unreachable(
                    f"{target.origin}: its certificate does not hold ({error.verify_message})"
                ) from None
            except OSError as error:
                # Not its own words: they name the address, which may be an internal one.
                problem = os.strerror(error.errno) if error.errno else type(error).__name__
        raise Unreachable(f"{target.origin} could not be reached: {problem}")

    async def _connect(self, target: Target, address: str) -> Connection:
        secure = target.scheme == "https"
        if secure and self._tls is None:
            self._tls = ssl.create_default_context()
        _, protocol = await asyncio.get_running_loop().create_connection(
            lambda: Connection(target.origin),
            address,
            target.port,
            ssl=self._tls if secure else None,
            server_hostname=target.host if secure else None,
        )
        return protocol

    def _give_back(self, connection: Connection, target: Target) -> None:
        if not connection.rest():
            connection.close()
            return
        key = _key(target)
        self._idle[connection] = key
        self._by_origin.setdefault(key, []).append(connection)
        while len(self._idle) > _IDLE_TOTAL_MAX:
            oldest, its_key = self._idle.popitem(last=False)
            with contextlib.suppress(ValueError):
                self._by_origin[its_key].remove(oldest)
            oldest.close()


async def _send_pieces(connection: Connection, body: Body) -> None:
    sent = 0
    async for piece in body.pieces:
        sent += len(piece)
        if sent > body.length:
            break
        if not await connection.write(piece):
            return
    if sent != body.length:
        connection.close()
        raise TooLarge(f"the request body has not the {body.length} bytes that were announced")


def _head(method: str, target: Target, headers: Sequence[tuple[str, str]], length: int) -> bytes:
    lines = [f"{method} {target.path} HTTP/1.1", f"Host: {target.authority}"]
    for name, value in headers:
        if "\r" in value or "\n" in value or "\0" in value:
            raise Refused(f"the header {name!r} holds a line break")
        lines.append(f"{name}: {value}")
    if length or method in ("POST", "PUT", "PATCH"):
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _key(target: Target) -> tuple[str, str, int]:
    return target.scheme, target.host, target.port


def _too_old(connection: Connection, now_s: float) -> bool:
    return now_s - connection.idle_since_s > _IDLE_S_MAX or now_s - connection.born_s > _AGE_S_MAX
