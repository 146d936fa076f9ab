"""Attacks on a listener, for a process of their own: each is bounded in count and ends by itself.

    python -m tests.contract.gateway.attacks slow_heads 127.0.0.1 8470 127.0.0.2 3

The last two words are the address from which it comes and for how many seconds it lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
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


JSON_BYTES = MB - 200
PAYLOADS: dict[str, bytes] = {
    "brackets": b"[" + b"[]," * (JSON_BYTES // 3 - 1) + b"1]",
    "objects": b"[" + b'{"a":1},' * (JSON_BYTES // 8 - 1) + b"1]",
    "nested": b"[" + (b"[" * 120 + b"]" * 120 + b",") * (JSON_BYTES // 241 - 1) + b"1]",
    "keys": b"{" + b",".join(b'"k%06d":1' % n for n in range(JSON_BYTES // 12)) + b"}",
    "numbers": b"[" + b"1," * (JSON_BYTES // 2 - 1) + b"1]",
    "long numbers": b"[" + (b"9" * 199 + b",") * (JSON_BYTES // 200 - 1) + b"1]",
    "far numbers": b"[" + b"1e100," * (JSON_BYTES // 6 - 1) + b"1]",
    "strings": b"[" + b'"",' * (JSON_BYTES // 3 - 1) + b"1]",
    "escapes": b'"' + b"\\u0041" * (JSON_BYTES // 6 - 1) + b'"',
    "backslashes": b'["' + b"\\\\" * (JSON_BYTES // 2 - 400) + b'"' + b",[]" * 200 + b"]",
    "surrogates": b'"' + b"\\ud83d\\ude00" * (JSON_BYTES // 12 - 1) + b'"',
}
REFUSED: dict[str, tuple[bytes, int]] = {
    "deep": (b"[" * (JSON_BYTES // 2) + b"]" * (JSON_BYTES // 2), 400),
    "deeper at the end": (b"[" + b"[]," * (JSON_BYTES // 3 - 99) + b"[" * 130 + b"]" * 131, 400),
    "half surrogates": (b'"' + b"\\ud83d" * (JSON_BYTES // 6 - 1) + b'"', 400),
    "NUL at the end": (b"[" + b"[]," * (JSON_BYTES // 3 - 9) + b'"\\u0000"]', 422),
    "too large": (b'"' + b"x" * MB + b'"', 413),
}


def large_bodies() -> list[tuple[str, str, bytes, int]]:
    """The largest bodies that routes with JSON take, of shapes that are slow to read."""
    job = b'{"task":"report","delay_ms":3600000,"payload":%b}'
    plane, work = "/v1/plane/jobs", "/internal/worker/"
    known = [(name, payload, 202) for name, payload in PAYLOADS.items()]
    known += [(name, payload, status) for name, (payload, status) in REFUSED.items()]
    bodies = [(name, plane, job % payload, status) for name, payload, status in known]
    misfit = b'{"nope":1,"payload":%b}'
    bodies += [(f"misfit {n}", plane, misfit % PAYLOADS[n], 422) for n in ("brackets", "nested")]
    jobs = b'{"jobs":[' + b",".join([b'{"payload":1}'] * (JSON_BYTES // 14)) + b"]}"
    lost = b'{"worker_id":"w","lost":[' + b",".join([b'""'] * (JSON_BYTES // 3)) + b"]}"
    held = b",".join([b'{"job_id":"a","lease_token":""}'] * (JSON_BYTES // 32))
    bodies += [
        ("long list", plane, jobs, 422),
        ("long claim", work + "claim", lost, 422),
        ("long heartbeat", work + "heartbeat", b'{"worker_id":"w","leases":[' + held + b"]}", 422),
    ]
    few = b'{"task":"chat","delay_ms":3600000,"payload":{"a":[%b1]}}'
    bodies.append(("streams", "/v1/jobs", few % (b"[]," * 68_000), 202))
    nested = (b"[" * 120 + b"]" * 120 + b",") * 840
    bodies.append(("streams nested", "/v1/jobs", few % nested, 202))
    return bodies


async def send_large_bodies(dial: Dial) -> None:
    """Each of the bodies once, beginning with any; each has its right answer."""
    bodies = large_bodies()
    random.shuffle(bodies)
    for name, path, body, status in bodies:
        reader, writer = await dial()
        head = HEAD + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(b"POST %b HTTP/1.1\r\n" % path.encode() + head + body)
        line = await reader.readline()
        writer.close()
        assert line.startswith(b"HTTP/1.1 %d " % status), (name, path, line)


# With how many connections at once.
WITH_RIGHTS: dict[str, tuple[int, Attack]] = {"large_bodies": (8, send_large_bodies)}
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
    count, attack = {**ATTACKS, **WITH_RIGHTS}[name]

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
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:3], int(sys.argv[3]), sys.argv[4], float(sys.argv[5])))
