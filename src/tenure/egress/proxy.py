"""A forward proxy on loopback for libraries with their own HTTP client.

An object storage client resolves names itself, so checking its endpoint beforehand is not enough:
the name may have another address a moment later. This proxy resolves, checks and opens every
connection of the library. TLS passes through unchanged. Each proxy has a random password, so that
no other program on this machine can use it.

Some libraries keep an answer in memory, however long it is. So the proxy passes on at most 16 MiB
beyond what its user has taken (`taken`), then waits, and closes the connection if that lasts.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import cast
from urllib.parse import urlsplit

from tenure.egress.guard import (
    EgressError,
    Guard,
    RequestRefused,
    Target,
    TooLarge,
    Unreachable,
    read_target,
)

_HEAD_BYTES_MAX = 65_536
_HEAD_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_CHUNK_BYTES = 262_144
_AHEAD_BYTES_MAX = 16 * 1024 * 1024
_AHEAD_S_MAX = 30.0


class GuardedProxy:
    """Use as `async with GuardedProxy(guard) as proxy:` and pass `proxy.url` to the library."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._password = secrets.token_urlsafe(24)
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.failure: EgressError | None = None
        """Why the last exchange could not start or was cut; None if neither happened."""
        self._ahead_bytes = 0
        self._taken = asyncio.Event()

    @property
    def url(self) -> str:
        """The address of the proxy. It contains the password: do not log it."""
        if self._server is None:
            raise RuntimeError("the proxy has not been started: enter it with `async with`")
        port = self._server.sockets[0].getsockname()[1]
        return f"http://tenure:{self._password}@127.0.0.1:{port}"

    def taken(self) -> None:
        """Let servers send more: what they sent was taken, or another exchange begins."""
        self._ahead_bytes = 0
        self._taken.set()

    async def __aenter__(self) -> GuardedProxy:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, limit=_HEAD_BYTES_MAX
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._serving.add(task)
        try:
            await self._relay(reader, writer)
        except EgressError as error:
            self.failure = error
            # Not 403: the library would take that for refused credentials.
            await _send_status(writer, 400 if isinstance(error, RequestRefused) else 502)
        except (OSError, TimeoutError, ValueError, EOFError, asyncio.LimitOverrunError):
            await _send_status(writer, 502)
        except asyncio.CancelledError:
            pass  # the proxy closes; asyncio would log a cancelled handler as an error
        finally:
            self._serving.discard(task)
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_TIMEOUT_S):
            head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        if not self._is_authorized(lines):
            await _send_status(writer, 407)
            return
        method, where, _ = first.split(" ", 2)
        tunnel = method == "CONNECT"
        target = read_target(f"https://{where}/" if tunnel else where)
        upstream = await self._dial(target)
        self.failure = None
        try:
            if tunnel:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            else:
                upstream[1].write(_plain_head(method, target, where, lines))
            await self._relay_both((reader, writer), upstream)
        except OSError:
            pass  # the answer has begun: a status of ours would become part of it
        except TooLarge as error:
            self.failure = error
        finally:
            upstream[1].transport.abort()

    async def _relay_both(
        self,
        ours: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        theirs: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        up = asyncio.create_task(_copy(ours[0], theirs[1]))
        try:
            # The exchange ends when the server has sent all.
            await _copy(theirs[0], ours[1], self._count)
        finally:
            up.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await up

    async def _count(self, size: int) -> None:
        """Count bytes of a server; waits while it is too far ahead."""
        if self._ahead_bytes >= _AHEAD_BYTES_MAX:
            self._taken.clear()
            try:
                async with asyncio.timeout(_AHEAD_S_MAX):
                    await self._taken.wait()
            except TimeoutError:
                raise TooLarge(
                    f"the server sent more than {_AHEAD_BYTES_MAX} bytes that were not expected"
                ) from None
        self._ahead_bytes += size

    def _is_authorized(self, lines: list[str]) -> bool:
        expected = base64.b64encode(f"tenure:{self._password}".encode()).decode()
        for line in lines:
            name, _, value = line.partition(":")
            if name.lower() == "proxy-authorization":
                return hmac.compare_digest(value.strip().encode(), f"Basic {expected}".encode())
        return False

    async def _dial(self, target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for address in await self._guard.addresses(target):
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    return await asyncio.open_connection(address, target.port)
            except (OSError, TimeoutError):
                continue
        raise Unreachable(f"{target.origin}: no connection")


def _plain_head(method: str, target: Target, where: str, lines: list[str]) -> bytes:
    """The request head for the server. One request per connection, so that each is checked."""
    path = urlsplit(where)._replace(scheme="", netloc="").geturl() or "/"
    dropped = ("proxy-", "connection:", "keep-alive:")
    kept = [line for line in lines if not line.lower().startswith(dropped)]
    head = [f"{method} {path} HTTP/1.1", *kept, "Connection: close", "", ""]
    return "\r\n".join(head).encode("latin-1")


async def _copy(
    source: asyncio.StreamReader,
    sink: asyncio.StreamWriter,
    count: Callable[[int], Awaitable[None]] | None = None,
) -> None:
    while chunk := await source.read(_CHUNK_BYTES):
        if count is not None:
            await count(len(chunk))
        sink.write(chunk)
        await sink.drain()
    if sink.can_write_eof():
        sink.write_eof()


async def _send_status(writer: asyncio.StreamWriter, status: int) -> None:
    with contextlib.suppress(OSError):
        writer.write(
            f"HTTP/1.1 {status} -\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        await writer.drain()
