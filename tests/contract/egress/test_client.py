"""The client on real sockets: reuse, deadlines, byte limits, and peers that misbehave."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence

import pytest
import trustme

from tenure.egress import (
    Client,
    Disconnected,
    Guard,
    Limits,
    Policy,
    RequestRefused,
    TooLarge,
    Unreachable,
)
from tenure.egress.client import Body
from tests.contract.egress.scripted import Scripted, scripted

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LOOPBACK = Policy(allow=("127.0.0.0/8", "hooks.example"))


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    made = Client(Guard(LOOPBACK), limits=Limits(connect_ms=1_000, total_ms=5_000))
    yield made
    await made.close()


def url(server: Scripted, path: str = "/") -> str:
    return f"http://127.0.0.1:{server.port}{path}"


async def test_one_connection_serves_many_requests_in_turn(client: Client) -> None:
    async with scripted(lambda head, body: OK) as server:
        for number in range(20):
            answer = await client.send("POST", url(server), body=b"%d" % number)
            assert (answer.status, answer.body) == (200, b"ok")
    assert server.connections == 1
    assert server.bodies == [b"%d" % number for number in range(20)]


@pytest.mark.clause("I-53")
async def test_a_redirect_is_an_answer_and_is_not_followed(client: Client) -> None:
    async with scripted(lambda head, body: OK) as other:
        there = f"Location: http://127.0.0.1:{other.port}/"
        answer = f"HTTP/1.1 307 Go\r\n{there}\r\nContent-Length: 0\r\n\r\n".encode()
        async with scripted(lambda head, body: answer) as server:
            assert (await client.send("POST", url(server), body=b"x")).status == 307
        assert other.connections == 0


@pytest.mark.clause("I-53")
async def test_only_the_agreed_bytes_of_an_answer_are_read() -> None:
    big = b"HTTP/1.1 200 OK\r\nContent-Length: 50000000\r\n\r\n" + b"x" * 100_000
    client = Client(Guard(LOOPBACK), limits=Limits(body_bytes_max=1_000))
    async with scripted(lambda head, body: big) as server:
        answer = await client.send("GET", url(server))
        assert (answer.status, len(answer.body), answer.truncated) == (200, 1_000, True)
        await client.send("GET", url(server))
    assert server.connections == 2, "a connection with an unread rest must not be used again"


@pytest.mark.clause("I-53")
async def test_a_peer_that_only_says_continue_is_given_up(client: Client) -> None:
    async with scripted(lambda head, body: b"HTTP/1.1 100 Continue\r\n\r\n" * 10 + OK) as server:
        assert (await client.send("GET", url(server))).body == b"ok"
    async with scripted(lambda head, body: b"HTTP/1.1 100 Continue\r\n\r\n" * 11) as server:
        with pytest.raises(TooLarge, match="goes on with informational responses"):
            await client.send("GET", url(server))


@pytest.mark.clause("I-53")
async def test_a_peer_that_never_answers_is_given_up_at_the_deadline(client: Client) -> None:
    async with scripted(lambda head, body: b"") as server:
        with pytest.raises(Unreachable, match=r"took longer than 0\.2 s"):
            await client.send("POST", url(server), limits=Limits(total_ms=200))


@pytest.mark.clause("I-53")
async def test_an_answer_that_drips_ends_at_the_total_deadline(client: Client) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            while True:
                writer.write(b"1\r\nx\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)  # the drip itself
        except OSError:
            pass

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(Unreachable, match="took longer"):
        await client.send("GET", f"http://127.0.0.1:{port}/", limits=Limits(total_ms=300))
    server.close()


@pytest.mark.parametrize(
    ("raw", "status", "body"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 200, b"ok"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK, 200, b"ok"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 200, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n", 503, b""),
    ],
)
async def test_every_usual_form_of_an_answer_is_understood(
    client: Client, raw: bytes, status: int, body: bytes
) -> None:
    async with scripted(lambda head, _: raw) as server:
        for _ in range(2):
            answer = await client.send("POST", url(server), body=b"{}")
            assert (answer.status, answer.body) == (status, body)
    assert server.connections == 1


async def test_an_answer_without_a_length_ends_with_its_connection(client: Client) -> None:
    async def close_after(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        writer.close()

    server = await asyncio.start_server(close_after, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    answer = await client.send("GET", f"http://127.0.0.1:{port}/")
    assert answer.body == b"all of it"
    server.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"\x15\x03\x01",
    ],
)
async def test_a_peer_that_breaks_off_or_speaks_otherwise_is_told_apart(
    client: Client, raw: bytes
) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(Disconnected) as caught:
        await client.send("GET", f"http://127.0.0.1:{port}/")
    assert not caught.value.stale
    server.close()


@pytest.mark.clause("I-53")
async def test_headers_without_end_are_cut_off(client: Client) -> None:
    flood = b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: %s\r\n" % (i, b"y" * 200) for i in range(400))
    async with scripted(lambda head, body: flood) as server:
        with pytest.raises((TooLarge, Disconnected)):
            await client.send("GET", url(server))


async def test_an_idle_connection_that_was_closed_is_told_as_stale(client: Client) -> None:
    answers = iter([OK, None])
    async with scripted(lambda head, body: next(answers)) as server:
        await client.send("GET", url(server))
        with pytest.raises(Disconnected) as caught:
            await client.send("GET", url(server))
    assert caught.value.stale


async def test_an_unasked_answer_is_never_taken_for_the_next_one(client: Client) -> None:
    async with scripted(lambda head, body: OK + OK.replace(b"ok", b"no")) as server:
        for _ in range(3):
            assert (await client.send("GET", url(server))).body == b"ok"
    assert server.connections == 3


async def test_a_line_break_in_a_header_is_refused_before_anything_is_sent(client: Client) -> None:
    async with scripted(lambda head, body: OK) as server:
        with pytest.raises(RequestRefused, match="line break"):
            await client.send("GET", url(server), headers=[("x-a", "1\r\nx-b: 2")])
        assert server.heads == []


async def test_bodies_of_any_size_go_out_and_come_in_by_pieces(client: Client) -> None:
    piece, count = b"z" * 65_536, 64

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield piece

    echo = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
    async with scripted(lambda head, body: echo % len(body) + body) as server:
        body = Body(len(piece) * count, pieces())
        async with client.open("PUT", url(server), body=body) as answer:
            size = sum([len(piece) async for piece in answer.chunks])
    assert size == len(piece) * count


async def test_a_peer_that_answers_before_it_has_read_the_body_is_heard(client: Client) -> None:
    """413 to a large upload: that is an answer, and the connection is not used again."""
    connections = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 -\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield b"z" * 65_536
            await asyncio.sleep(0)

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    at = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    for _ in range(2):
        async with client.open("PUT", at, body=Body(2**40, pieces())) as answer:
            assert answer.status == 413
    assert connections == 2
    server.close()


async def test_the_certificate_is_held_against_the_name_and_not_the_address() -> None:
    ca = trustme.CA()
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("hooks.example").configure_cert(theirs)
    ours = ssl.create_default_context()
    ca.configure_trust(ours)

    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    client = Client(Guard(LOOPBACK, resolve=resolve), tls=ours)
    async with scripted(lambda head, body: OK, tls=theirs) as server:
        answer = await client.send("GET", f"https://hooks.example:{server.port}/x")
        assert answer.status == 200
        assert server.heads[0].startswith(b"GET /x HTTP/1.1\r\nHost: hooks.example:")
        with pytest.raises(Unreachable, match="certificate"):
            await client.send("GET", f"https://127.0.0.1:{server.port}/x")
    await client.close()


@pytest.mark.clause("I-52")
async def test_errors_name_the_origin_and_never_the_path_or_query(client: Client) -> None:
    async with scripted(lambda head, body: None) as server:
        with pytest.raises(Disconnected) as caught:
            await client.send("GET", url(server, "/canary-path?sig=canary-query"))
    assert "canary" not in str(caught.value)
    assert f"http://127.0.0.1:{server.port}" in str(caught.value)
