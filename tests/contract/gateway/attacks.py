"""Attacks on a listener, for a process of their own: each is bounded in count and ends by itself.

    python -m tests.contract.gateway.attacks slow_heads 127.0.0.1 8470 127.0.0.2 3

The last two words are the address from which it comes and for how many seconds it lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable

MB = 1 << 20
ROUNDS_MAX = 10
HEAD = b"Host: 127.0.0.1\r\n"
FORM = HEAD + b"Content-Type: application/x-www-form-urlencoded\r\n"

Dial = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
Attack = Callable[[Dial], Awaitable[None]]


async def _trickle(dial: Dial, first: bytes, piece: bytes) -> None:
    _, writer = await dial()
    writer.write(first)
    while True:
        await asyncio.sleep(0.3)  # the pace is the attack
        writer.write(piece)
        await writer.drain()


async def half_request(dial: Dial) -> None:
    """The first half of a request, and then nothing."""
    reader, writer = await dial()
    writer.write(b"GET /livez HTTP/1.1\r\nHost: 127.0")
    await reader.read()


async def silent(dial: Dial) -> None:
    """A connection without a byte."""
    reader, _ = await dial()
    await reader.read()


async def idle(dial: Dial) -> None:
    """A connection that is kept after its answer."""
    reader, writer = await dial()
    writer.write(b"GET /livez HTTP/1.1\r\n" + HEAD + b"\r\n")
    await reader.read()


async def slow_head(dial: Dial) -> None:
    """A head that never ends, a line at a time."""
    await _trickle(dial, b"GET /livez HTTP/1.1\r\n" + HEAD, b"X-More: 1\r\n")


async def slow_body(dial: Dial) -> None:
    """A form that comes byte by byte."""
    await _trickle(dial, b"POST /login HTTP/1.1\r\n" + FORM + b"Content-Length: 5000\r\n\r\n", b"a")


async def huge_head(dial: Dial) -> None:
    """80 MB of headers."""
    _, writer = await dial()
    writer.write(b"GET /livez HTTP/1.1\r\n" + HEAD)
    for _ in range(80):
        writer.write(b"X-Large: " + b"x" * MB + b"\r\n")
        await writer.drain()


async def huge_trailer(dial: Dial) -> None:
    """A small body with 80 MB of trailers."""
    _, writer = await dial()
    chunked = b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    writer.write(b"POST /login HTTP/1.1\r\n" + FORM + chunked)
    for _ in range(80):
        writer.write(b"X-Large: " + b"x" * MB + b"\r\n")
        await writer.drain()


async def big_form(dial: Dial) -> None:
    """A form of 2 MB with as many fields as fit."""
    reader, writer = await dial()
    body = b"a=%20&" * 333_000
    writer.write(b"POST /login HTTP/1.1\r\n" + FORM)
    writer.write(b"Origin: http://127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body))
    writer.write(body)
    await reader.readuntil(b"\r\n\r\n")


async def endless_body(dial: Dial) -> None:
    """A body for a page that takes none: 400 MB of it."""
    _, writer = await dial()
    writer.write(b"GET /livez HTTP/1.1\r\n" + HEAD + b"Content-Length: 419430400\r\n\r\n")
    for _ in range(400):
        writer.write(b"x" * MB)
        await writer.drain()


async def pipelined(dial: Dial) -> None:
    """20,000 requests at once on one connection."""
    _, writer = await dial()
    writer.write((b"GET /livez HTTP/1.1\r\n" + HEAD + b"\r\n") * 20_000)
    await writer.drain()


# With how many connections at once.
ATTACKS: dict[str, tuple[int, Attack]] = {
    "half_requests": (400, half_request),
    "silent_connections": (400, silent),
    "idle_connections": (400, idle),
    "slow_heads": (400, slow_head),
    "slow_bodies": (400, slow_body),
    "huge_heads": (4, huge_head),
    "huge_trailers": (4, huge_trailer),
    "big_forms": (10, big_form),
    "endless_bodies": (4, endless_body),
    "pipelined_requests": (4, pipelined),
}


async def run(name: str, host: str, port: int, source: str, seconds: float) -> None:
    """All connections of an attack at once, each again when it was ended, so many seconds long."""
    count, attack = ATTACKS[name]

    async def dial() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(host, port, local_addr=(source, 0))

    async def again_and_again(place: float) -> None:
        await asyncio.sleep(place / 2)  # spread over half a second, as are the repetitions
        for _ in range(ROUNDS_MAX):
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await attack(dial)
            await asyncio.sleep(0.5)  # so that it lasts: the gateway ends most of them at once

    tasks = [asyncio.create_task(again_and_again(n / count)) for n in range(count)]
    _, going_on = await asyncio.wait(tasks, timeout=seconds)
    for task in going_on:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:3], int(sys.argv[3]), sys.argv[4], float(sys.argv[5])))
