"""Limits of the gateway are settings, and a gateway that stops says so without a traceback."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.contract.cli.conftest import Cli, Program, Start
from tests.contract.gateway.web import Web, read_head


def gateway(start: Start, port: int, **settings: str) -> Program:
    named = {f"TENURE_GATEWAY_{name.upper()}": value for name, value in settings.items()}
    program = start("gateway", "--port", str(port), **named)
    program.heard("gateway_ready")
    return program


def web(port: int, key: str = "") -> Web:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return Web(f"http://127.0.0.1:{port}", headers)


def new_key(cli: Cli) -> str:
    return cli("keys", "create", "tester").out.strip().splitlines()[-1]


async def status_of(client: Web, path: str) -> int:
    """The status of an event stream, which is left open."""
    reader, writer = await client.connect()
    writer.write(client.head("GET", path))
    status, _ = await read_head(reader)
    HELD.append(writer)
    return status


HELD: list[asyncio.StreamWriter] = []


@pytest.mark.parametrize(("limit", "streams"), [("", 20), ("2", 2)])
async def test_open_event_streams_of_a_key_are_limited_by_a_setting(
    cli: Cli, start: Start, free_port: int, limit: str, streams: int
) -> None:
    key = await asyncio.to_thread(new_key, cli)
    await asyncio.to_thread(gateway, start, free_port, streams_per_key=limit)
    client = web(free_port, key)
    path = f"/v1/jobs/{await client.submit()}/events"
    assert [await status_of(client, path) for _ in range(streams + 1)] == [200] * streams + [429]


async def test_the_heartbeat_of_event_streams_is_a_setting(start: Start, free_port: int) -> None:
    await asyncio.to_thread(gateway, start, free_port, heartbeat_s="0.1")
    client = web(free_port)
    following = await client.follow(await client.submit())
    async with asyncio.timeout(10):
        async for event in following:
            if event.name == ":":
                break
    following.close()


async def test_the_rate_of_requests_is_a_setting(start: Start, free_port: int) -> None:
    await asyncio.to_thread(gateway, start, free_port, rate_per_s="0.01", rate_burst="3")
    client = web(free_port)
    statuses = [(await client.get("/api/queues")).status for _ in range(4)]
    assert statuses == [200, 200, 200, 429]


async def test_the_size_of_bodies_is_a_setting(start: Start, free_port: int) -> None:
    await asyncio.to_thread(gateway, start, free_port, body_bytes_max="1000")
    body = {"task": "chat", "payload": {"text": "x" * 1_000}}
    assert (await web(free_port).post("/v1/jobs", body)).status == 413


async def test_the_time_of_bodies_is_a_setting(start: Start, free_port: int) -> None:
    await asyncio.to_thread(gateway, start, free_port, body_timeout_s="0.2")
    client = web(free_port)
    reader, writer = await client.connect()
    head = {"content-type": "application/json", "content-length": "100"}
    writer.write(client.head("POST", "/v1/jobs", None, head))
    async with asyncio.timeout(10):
        status, _ = await read_head(reader)
    assert status == 408
    writer.close()


@pytest.mark.parametrize(
    "name", ["streams_per_key", "heartbeat_s", "rate_per_s", "body_bytes_max", "body_timeout_s"]
)
def test_a_limit_that_cannot_be_is_refused(start: Start, name: str) -> None:
    program = start("gateway", "--port", "1", **{f"TENURE_GATEWAY_{name.upper()}": "-1"})
    assert program.ended() == 2
    assert "at least" in program.words


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_gateway_with_clients_stops_without_a_traceback(
    start: Start, free_port: int, number: signal.Signals, presses: int
) -> None:
    """There are pages with a live stream, a follower, a kept connection, and half a request."""
    program = await asyncio.to_thread(gateway, start, free_port, drain_timeout_s="1")
    client = web(free_port)
    paths = (f"/v1/jobs/{await client.submit()}/events", "/live", "/live")
    streams = [await client.stream(path) for path in paths]
    page, writer = await client.connect()
    writer.write(client.head("GET", "/"))
    await read_head(page)
    _, half = await client.connect()
    head = {"content-type": "application/json", "content-length": "100"}
    half.write(client.head("POST", "/v1/jobs", None, head) + b"{")
    await half.drain()
    assert (await client.get("/livez")).status == 200, "half a request has arrived before this one"
    for _ in range(presses):
        program.signal(number)
        await asyncio.to_thread(program.heard, "gateway_draining")
    code = await asyncio.to_thread(program.ended)
    for stream in streams:
        stream.close()
    writer.close()
    half.close()
    assert "Traceback" not in program.words, program.words
    assert "Error" not in program.words, program.words
    assert code == 0


async def test_clients_that_leave_before_their_answers_leave_no_traceback(
    start: Start, free_port: int
) -> None:
    program = gateway(start, free_port)
    client = web(free_port)
    for _ in range(8):
        reader, writer = await client.connect()
        writer.write(client.head("GET", "/readyz") * 10)
        await reader.read(100)
        writer.transport.abort()
    for _ in range(20):  # behind those of the clients that left
        assert (await client.get("/readyz")).status == 200
    assert "request_failed" not in program.words
    assert "Traceback" not in program.words
