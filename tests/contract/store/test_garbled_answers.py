"""Sentinels and cluster nodes that answer garbage: one of them harms nobody while others answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from tenure.core.errors import StoreUnreachable
from tenure.store.embedded import EmbeddedRedis
from tenure.store.redis import Redis
from tenure.store.redis.bulk import BulkRedis
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)

GARBAGE = {
    "empty": b"*0\r\n",
    "nothing": b"*2\r\n$-1\r\n$-1\r\n",
    "a number": b":5\r\n",
    "a word": b"+OK\r\n",
    "numbers": b"*2\r\n:1\r\n:2\r\n",
    "no port": b"*2\r\n$9\r\n127.0.0.1\r\n$3\r\nabc\r\n",
    "a port beyond all": b"*2\r\n$9\r\n127.0.0.1\r\n$6\r\n999999\r\n",
    "no text": b"*2\r\n$2\r\n\xff\xfe\r\n$1\r\n1\r\n",
    "no node": b"*1\r\n*3\r\n:0\r\n:16383\r\n*0\r\n",
    "a slot that is a text": b"*1\r\n*3\r\n$1\r\na\r\n:1\r\n*2\r\n$1\r\nh\r\n:1\r\n",
    "a redirection": b"-MOVED x y\r\n",
}
Answer = Callable[[list[bytes]], bytes]


def bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


@asynccontextmanager
async def answering(answer: Answer) -> AsyncGenerator[str]:
    """The address of a server that answers each command as `answer` says."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readline():
                words = []
                for _ in range(int(head[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                is_greeting = words[0] in (b"CLIENT", b"AUTH", b"SELECT")
                writer.write(b"+OK\r\n" if is_greeting else answer(words))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def telling(topology: str, server: EmbeddedRedis, garbage: bytes = b"") -> Answer:
    """What a Sentinel, or a node, says of the one real server, or garbage."""
    parts = urlsplit(server.url)
    host, port = bulk((parts.hostname or "").encode()), parts.port or 0

    def answer(words: list[bytes]) -> bytes:
        if words[0] == b"SUBSCRIBE":
            events = [b"", b"mymaster", b"slave x 1 1 @ mymaster y", b"\xff"]
            return b"".join(
                [b"*3\r\n$9\r\nsubscribe\r\n%b:1\r\n" % bulk(words[-1])]
                + [
                    b"*3\r\n$7\r\nmessage\r\n%b%b" % (bulk(w), bulk(e))
                    for w in words[1:]
                    for e in events
                ]
            )
        if garbage:
            return garbage
        if topology == "sentinel":
            return b"*2\r\n%b%b" % (host, bulk(b"%d" % port))
        return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n%b:%d\r\n" % (host, port)

    return answer


def url_of(topology: str, *places: str) -> str:
    service = "/mymaster/0" if topology == "sentinel" else ""
    return f"redis+{topology}://{','.join(places)}{service}"


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("topology", ["sentinel", "cluster"])
async def test_an_answer_that_cannot_be_read_is_as_none(
    server: EmbeddedRedis, topology: str, garbage: bytes
) -> None:
    async with (
        answering(telling(topology, server, garbage)) as bad,
        answering(telling(topology, server)) as good,
    ):
        client = Redis(url_of(topology, bad, good))
        try:
            # An empty map is one that can be read: the next call asks another node.
            async def answered() -> bool:
                try:
                    return await client.call("ECHO", "here") == b"here"
                except StoreUnreachable:
                    return False

            await until(answered)
            if client._watching is not None:
                assert not client._watching.done()
        finally:
            await client.close()
        only = url_of(topology, bad)

        def locate() -> None:
            with BulkRedis(only, key="k"):
                pass

        with pytest.raises(StoreUnreachable):
            await asyncio.to_thread(locate)


async def test_events_that_cannot_be_read_do_not_end_the_watch_of_sentinels(
    server: EmbeddedRedis,
) -> None:
    asked = 0
    answer = telling("sentinel", server)

    def count(words: list[bytes]) -> bytes:
        nonlocal asked
        asked += words[0] == b"SUBSCRIBE"
        return answer(words)

    async with answering(count) as place:
        client = Redis(url_of("sentinel", place))
        try:
            assert await client.call("ECHO", "here") == b"here"

            async def again() -> bool:
                return asked >= 2

            await until(again)
            assert client._watching is not None
            assert not client._watching.done()
        finally:
            await client.close()
