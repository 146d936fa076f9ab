"""A TCP proxy that does to a connection what networks do, on command.

    proxy = LossyProxy(server.url)
    async with proxy:
        client = Redis(proxy.url)
        proxy.drop_reply(when=lambda command: command[0] == b"EVALSHA")

The fault that matters most is the lost reply: the server executes the command, the answer never
arrives. The proxy lets everything before the victim be answered, sends the victim and whatever
follows it in the same flight to the server, waits until the server has answered them all, throws
the answers away, and only then breaks the connection: so it is certain that they were executed.

With `speaks="bytes"` the upstream is not Redis: `when` sees each piece of bytes that the client
sends, and a reply counts as given when the upstream has sent anything at all after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

import hiredis

Request = Sequence[bytes]
"""A Redis command as its parts; with `speaks="bytes"` one piece of bytes, alone in a list."""

_PIECE = 1 << 16


class LossyProxy:
    """Stands between clients and the server of `upstream_url`; passes everything until told."""

    def __init__(
        self, upstream_url: str, *, port: int = 0, speaks: Literal["redis", "bytes"] = "redis"
    ) -> None:
        self.speaks = speaks
        self.accepted = 0  # connections ever accepted
        self.requests = 0  # commands (or pieces) seen from clients
        self.replies_lost = 0
        self.latency_ms = 0.0
        self._upstream = urlsplit(upstream_url)
        self._port = port
        self._listener: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._refusing = False
        self._losses_left = 0
        self._silently = False
        self._then_refuse = False
        self._is_victim: Callable[[Request], bool] = _any_request
        self._loss_done = asyncio.Event()

    @property
    def port(self) -> int:
        """Where the proxy listens on 127.0.0.1; the same after `stop` and `start`."""
        return self._port

    @property
    def url(self) -> str:
        """The upstream's URL with this proxy in its place."""
        credentials, at, _ = self._upstream.netloc.rpartition("@")
        return urlunsplit(self._upstream._replace(netloc=f"{credentials}{at}127.0.0.1:{self.port}"))

    @property
    def connections(self) -> int:
        """Connections open now."""
        return len(self._links)

    def lead_to(self, upstream_url: str) -> None:
        """New connections go to another server; open ones stay where they are."""
        self._upstream = urlsplit(upstream_url)

    async def start(self) -> Self:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._listener.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Breaks all connections and listens no more."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        links = list(self._links)
        self.reset()
        if links:
            await asyncio.wait([link.task for link in links])

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # -- the faults ---------------------------------------------------------------------------

    def pass_through(self) -> None:
        """Ends every fault; what a black hole held back flows again."""
        self._losses_left = 0
        self._refusing = False
        self.latency_ms = 0.0
        self._passing.set()

    def drop_reply(
        self,
        count: int = 1,
        *,
        when: Callable[[Request], bool] | None = None,
        silently: bool = False,
        then_refuse: bool = False,
    ) -> None:
        """Loses the reply of the next `count` requests for which `when` holds.

        Each loss ends its connection: with a reset, or `silently`, where nothing is ever heard on
        it again. (A reply missing from a connection that lives on would be no network fault.)
        With `then_refuse` every new connection after the last loss breaks, until `pass_through`.
        """
        self._losses_left = count
        self._is_victim = when or _any_request
        self._silently = silently
        self._then_refuse = then_refuse
        self._loss_done.clear()

    async def reply_dropped(self, deadline_s: float = 10.0) -> None:
        """Waits until the last reply asked for by `drop_reply` has been lost."""
        await asyncio.wait_for(self._loss_done.wait(), deadline_s)

    def reset(self) -> None:
        """Breaks all open connections; new ones are welcome."""
        for link in list(self._links):
            link.abort()
            link.task.cancel()  # it may be waiting in a black hole

    def refuse(self) -> None:
        """Breaks all connections and every new one at once, until `pass_through`."""
        self._refusing = True
        self.reset()

    def blackhole(self) -> None:
        """Connections stand, new ones are accepted, nothing flows, until `pass_through`."""
        self._passing.clear()

    def latency(self, delay_ms: float) -> None:
        """Holds each piece back for so long, in each direction."""
        self.latency_ms = delay_ms

    # -- one connection -----------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        link = _Link(self, task, reader, writer)
        self._links.add(link)
        try:
            if not self._refusing:
                host, port = self._upstream.hostname or "127.0.0.1", self._upstream.port or 6379
                link.server_reader, link.server_writer = await asyncio.open_connection(host, port)
                await link.run()
        except OSError:
            pass  # a broken connection is this class's business
        finally:
            link.abort()
            self._links.discard(link)

    async def _delay(self) -> None:
        if self.latency_ms:
            await asyncio.sleep(self.latency_ms / 1000)
        await self._passing.wait()

    def _takes(self, request: Request) -> bool:
        """Whether this request is the next victim; if so, it is counted."""
        self.requests += 1
        if self._losses_left and self._is_victim(request):
            self._losses_left -= 1
            self._refusing = self._refusing or (self._then_refuse and not self._losses_left)
            return True
        return False


class _Link:
    """One client's connection and its twin to the server."""

    def __init__(
        self,
        proxy: LossyProxy,
        task: asyncio.Task[Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.task = task
        self.server_reader: asyncio.StreamReader | None = None
        self.server_writer: asyncio.StreamWriter | None = None
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._requests = hiredis.Reader(notEnoughData=...)
        self._replies = hiredis.Reader(notEnoughData=...)
        self._asked = 0
        self._answered = 0
        self._progress = asyncio.Event()
        self._muted = False

    def abort(self) -> None:
        for writer in (self._writer, self.server_writer):
            if writer is not None:
                writer.transport.abort()

    async def run(self) -> None:
        """Both directions, until either ends."""
        flows = [asyncio.create_task(flow) for flow in (self._upstream(), self._downstream())]
        try:
            done, _ = await asyncio.wait(flows, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for flow in flows:
                flow.cancel()
            await asyncio.wait(flows)
        for flow in done:
            await flow  # what the proxy itself did wrong is raised; broken connections are not

    async def _upstream(self) -> None:
        """Client to server, until a victim comes by."""
        assert self.server_writer is not None
        while data := await _read(self._reader):
            await self._proxy._delay()
            before, victim, executing = self._divide(data)
            if before:
                self.server_writer.write(before)
                await self.server_writer.drain()
            if victim:
                await self._lose_reply(victim, executing)
                return

    def _divide(self, data: bytes) -> tuple[bytes, bytes, int]:
        """What goes through untouched, the victim with all that follows it, and their number."""
        if self._proxy.speaks == "bytes":
            return (b"", data, 1) if self._proxy._takes([data]) else (data, b"", 0)
        self._requests.feed(data)
        commands: list[list[bytes]] = []
        while (command := self._requests.gets()) is not ...:
            commands.append(command)
        for index, command in enumerate(commands):
            if self._proxy._takes(command):
                self._asked += index
                rest = commands[index:]
                return _packed(commands[:index]), _packed(rest), len(rest)
        self._asked += len(commands)
        return _packed(commands), b"", 0

    async def _lose_reply(self, victim: bytes, executing: int) -> None:
        """The victim is executed, its reply is not delivered, and the connection is over."""
        assert self.server_writer is not None
        if self._proxy.speaks == "redis":
            await self._until(lambda: self._answered >= self._asked)
        count = self._answered + executing
        self._muted = True
        self.server_writer.write(victim)
        await self.server_writer.drain()
        await self._until(lambda: self._answered >= count)
        self._proxy.replies_lost += 1
        if not self._proxy._losses_left:
            self._proxy._loss_done.set()
        if self._proxy._silently:
            while await _read(self._reader):
                pass  # heard, never passed on
        self.abort()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._progress.clear()
            await self._progress.wait()

    async def _downstream(self) -> None:
        """Server to client, unless the replies are being lost."""
        assert self.server_reader is not None
        while data := await _read(self.server_reader):
            self._count_replies(data)
            if not self._muted:
                await self._proxy._delay()
                self._writer.write(data)
                await self._writer.drain()
            self._progress.set()

    def _count_replies(self, data: bytes) -> None:
        if self._proxy.speaks == "bytes":
            self._answered += 1
            return
        self._replies.feed(data)
        while self._replies.gets() is not ...:
            self._answered += 1


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(_PIECE)
    except OSError:
        return b""


def _packed(commands: Sequence[Sequence[bytes]]) -> bytes:
    packed = [hiredis.pack_command(tuple(parts)) for parts in commands]  # type: ignore[arg-type]
    return b"".join(packed)


def _any_request(request: Request) -> bool:
    """Every request but a Redis client's introduction, whose loss is only a failed connect."""
    return request[0].upper() not in (b"AUTH", b"CLIENT", b"HELLO", b"SELECT")
