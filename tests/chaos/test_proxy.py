"""The proxy does what it says: a fault that is not what it seems would prove the wrong thing."""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator

import pytest

from tenure.store.embedded import EmbeddedRedis
from tests.chaos.proxy import LossyProxy


@pytest.fixture(scope="module")
def server() -> Generator[EmbeddedRedis]:
    server = EmbeddedRedis(appendfsync="no")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def proxy(server: EmbeddedRedis) -> AsyncGenerator[LossyProxy]:
    async with LossyProxy(server.url) as proxy:
        yield proxy


class Wire:
    """A client that hides nothing: bytes out, bytes in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, port: int) -> "Wire":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, *words: str) -> None:
        parts = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
        self.writer.write(f"*{len(words)}\r\n{parts}".encode())

    async def line(self) -> bytes:
        return await asyncio.wait_for(self.reader.readline(), 5)

    async def ends(self) -> bool:
        """Whether the other side breaks the connection without another byte."""
        try:
            return await asyncio.wait_for(self.reader.read(100), 5) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.writer.transport.abort()


async def direct(server: EmbeddedRedis, *words: str) -> bytes:
    wire = await Wire.to(server.port)
    wire.send(*words)
    try:
        return await wire.line()
    finally:
        wire.close()


async def test_everything_passes_until_told_otherwise(proxy: LossyProxy) -> None:
    wire = await Wire.to(proxy.port)
    for _ in range(3):
        wire.send("PING")
        assert await wire.line() == b"+PONG\r\n"
    assert (proxy.accepted, proxy.connections, proxy.requests) == (1, 1, 3)
    wire.close()


async def test_the_victim_and_its_followers_are_executed_but_not_answered(
    server: EmbeddedRedis, proxy: LossyProxy
) -> None:
    wire = await Wire.to(proxy.port)
    proxy.drop_reply(when=lambda command: command[-1] == b"victim")
    for name in ("before", "victim", "after"):
        wire.send("INCR", name)
    assert await wire.line() == b":1\r\n"
    assert await wire.ends()
    await proxy.reply_dropped()
    assert proxy.replies_lost == 1
    for name in ("before", "victim", "after"):
        assert await direct(server, "INCR", name) == b":2\r\n"


async def test_as_many_replies_are_lost_as_were_asked_for(
    server: EmbeddedRedis, proxy: LossyProxy
) -> None:
    proxy.drop_reply(2)
    for lost in (True, True, False):
        wire = await Wire.to(proxy.port)
        wire.send("INCR", "times")
        if lost:
            assert await wire.ends()
        else:
            assert await wire.line() == b":3\r\n"
        wire.close()
    assert proxy.replies_lost == 2


async def test_the_introduction_of_a_client_is_no_victim_unless_chosen(proxy: LossyProxy) -> None:
    wire = await Wire.to(proxy.port)
    proxy.drop_reply()
    wire.send("CLIENT", "SETNAME", "me")
    assert await wire.line() == b"+OK\r\n"
    wire.send("PING")
    assert await wire.ends()


async def test_a_silent_loss_leaves_the_connection_standing(
    server: EmbeddedRedis, proxy: LossyProxy
) -> None:
    wire = await Wire.to(proxy.port)
    proxy.drop_reply(silently=True)
    wire.send("INCR", "hush")
    await proxy.reply_dropped()
    assert await direct(server, "GET", "hush") == b"$1\r\n"
    wire.send("PING")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wire.reader.read(1), 0.1)
    wire.close()


async def test_a_reset_breaks_what_is_open_and_no_more(proxy: LossyProxy) -> None:
    wire = await Wire.to(proxy.port)
    wire.send("PING")
    await wire.line()
    proxy.reset()
    assert await wire.ends()
    second = await Wire.to(proxy.port)
    second.send("PING")
    assert await second.line() == b"+PONG\r\n"
    second.close()


async def test_a_black_hole_holds_everything_back_until_it_ends(proxy: LossyProxy) -> None:
    wire = await Wire.to(proxy.port)
    wire.send("PING")
    await wire.line()
    proxy.blackhole()
    wire.send("PING")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wire.reader.read(1), 0.1)
    proxy.pass_through()
    assert await wire.line() == b"+PONG\r\n"
    wire.close()


async def test_stopping_in_a_black_hole_does_not_hang(server: EmbeddedRedis) -> None:
    proxy = await LossyProxy(server.url).start()
    wire = await Wire.to(proxy.port)
    proxy.blackhole()
    wire.send("PING")
    await asyncio.wait_for(proxy.stop(), 5)
    assert await wire.ends()


async def test_refused_connections_end_before_a_word_is_passed(proxy: LossyProxy) -> None:
    proxy.refuse()
    wire = await Wire.to(proxy.port)
    wire.send("PING")
    assert await wire.ends()
    proxy.pass_through()
    second = await Wire.to(proxy.port)
    second.send("PING")
    assert await second.line() == b"+PONG\r\n"
    second.close()


async def test_latency_is_paid_in_both_directions(proxy: LossyProxy) -> None:
    wire = await Wire.to(proxy.port)
    proxy.latency(30)
    started = time.monotonic()
    wire.send("PING")
    assert await wire.line() == b"+PONG\r\n"
    assert time.monotonic() - started >= 0.06
    wire.close()


async def test_it_comes_back_on_the_same_port(server: EmbeddedRedis) -> None:
    proxy = await LossyProxy(server.url).start()
    port = proxy.port
    await proxy.stop()
    with pytest.raises(ConnectionRefusedError):
        await Wire.to(port)
    await proxy.start()
    assert proxy.port == port
    await proxy.stop()


async def test_a_command_in_pieces_and_a_big_one_pass_whole(proxy: LossyProxy) -> None:
    wire = await Wire.to(proxy.port)
    wire.writer.write(b"*1\r\n$4\r\nPI")
    await wire.writer.drain()
    wire.writer.write(b"NG\r\n")
    assert await wire.line() == b"+PONG\r\n"
    wire.send("ECHO", "x" * 300_000)
    assert await wire.line() == b"$300000\r\n"
    assert await asyncio.wait_for(wire.reader.readexactly(300_002), 5) == b"x" * 300_000 + b"\r\n"
    wire.close()


async def test_another_protocol_loses_the_reply_to_the_bytes_chosen() -> None:
    heard: list[bytes] = []

    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            heard.append(line)
            writer.write(line.upper())
        writer.close()

    upstream = await asyncio.start_server(shout, "127.0.0.1", 0)
    url = f"postgresql://ann:pw@127.0.0.1:{upstream.sockets[0].getsockname()[1]}/db"
    async with LossyProxy(url, speaks="bytes") as proxy:
        assert proxy.url == f"postgresql://ann:pw@127.0.0.1:{proxy.port}/db"
        proxy.drop_reply(when=lambda piece: b"commit" in piece[0])
        wire = await Wire.to(proxy.port)
        wire.writer.write(b"begin\n")
        assert await wire.line() == b"BEGIN\n"
        wire.writer.write(b"commit\n")
        assert await wire.ends()
        assert heard == [b"begin\n", b"commit\n"]
    upstream.close()
