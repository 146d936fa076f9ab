"""Connections are bounded in bytes, in time and in number, and nothing at work is cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from urllib.parse import urlsplit

import pytest
import uvloop
from structlog.testing import capture_logs

from tenure.core.errors import UsageError
from tenure.gateway.http import connections
from tenure.gateway.keyrings import open_keyring
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tenure.store.embedded import EmbeddedRedis
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.web import Reply, Web, read_head, read_reply
from tests.waiting import until

Dialled = tuple[asyncio.StreamReader, asyncio.StreamWriter]
FORM = {"content-type": "application/x-www-form-urlencoded"}
HALF = b"GET /livez HTTP/1.1\r\nHost: 127.0"


async def dial(web: Web, source: str = "127.0.0.1") -> Dialled:
    parts = urlsplit(web.url)
    return await asyncio.open_connection(parts.hostname, parts.port, local_addr=(source, 0))


async def half_requests(web: Web, source: str, count: int) -> list[Dialled]:
    made = [await dial(web, source) for _ in range(count)]
    for _, writer in made:
        writer.write(HALF)
    return made


async def served(web: Web, source: str) -> int:
    """The status of a request from an address."""
    reader, writer = await dial(web, source)
    writer.write(web.head("GET", "/livez"))
    async with asyncio.timeout(10):
        status, _ = await read_head(reader)
    writer.close()
    return status


def is_refusal(reply: Reply, status: int, code: str) -> None:
    assert (reply.status, reply.json["code"]) == (status, code), reply
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.headers["connection"] == "close"


async def refusal(dialled: Dialled) -> Reply:
    """The answer, after which the gateway closes."""
    reader, writer = dialled
    async with asyncio.timeout(10):
        reply = await read_reply(reader)
        assert await reader.read() == b""
    writer.close()
    return reply


async def is_cut(reader: asyncio.StreamReader, within_s: float = 10) -> bool:
    """Whether the gateway ends the connection without a word."""
    try:
        async with asyncio.timeout(within_s):
            return await reader.read() == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "headers",
    [
        b"X-Large: " + b"x" * 40_000 + b"\r\n\r\n",
        b"X-Endless: " + b"x" * 2_000_000,
        b"X-Line: 12345\r\n" * 3_000,
        b"A:\r\n" * 101 + b"\r\n",
    ],
    ids=["one header", "a header without end", "lines without end", "too many headers"],
)
async def test_a_head_over_the_limit_is_refused_with_431(web: Web, headers: bytes) -> None:
    reader, writer = await web.connect()
    writer.write(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n" + headers)
    is_refusal(await refusal((reader, writer)), 431, "head_too_large")
    assert (await web.get("/livez")).status == 200


async def test_a_head_within_the_limit_is_served(site: Site) -> None:
    web = await site.web(head_bytes_max=60_000)
    assert (await web.get("/livez", x_large="x" * 59_000)).status == 200
    reply = await web.get("/livez", x_large="x" * 61_000)
    is_refusal(reply, 431, "head_too_large")


async def test_a_url_over_the_limit_is_refused_with_414(web: Web) -> None:
    reply = await web.get("/readyz?" + "a&" * 5_000)
    is_refusal(reply, 414, "url_too_long")


async def test_a_head_behind_another_request_is_bounded_as_well(web: Web) -> None:
    reader, writer = await web.connect()
    long = web.head("GET", "/readyz?" + "a&" * 100_000)
    writer.write(web.head("GET", "/livez") + long)
    answers = []
    async with asyncio.timeout(10):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                answers.append((await read_reply(reader)).status)
    assert answers in ([], [200], [200, 414])
    writer.close()


async def test_trailers_without_end_end_their_connection(site: Site) -> None:
    web = await site.web(anonymous=False)
    reader, writer = await web.connect()
    writer.write(web.head("POST", "/login", None, {**FORM, "transfer-encoding": "chunked"}))
    writer.write(b"1\r\na\r\n0\r\nX-Endless: " + b"x" * 1_000_000)
    assert await is_cut(reader)
    writer.close()


async def test_a_trailer_is_no_header(site: Site) -> None:
    """A proxy checks the headers that say who the user is; trailers may pass it."""
    web = await site.web(anonymous=False)
    ring = open_keyring(site.url())
    _, key = await ring.create(["admin"], "boss")
    await ring.close()
    assert (await web.get("/v1/jobs", authorization=f"Bearer {key}")).status == 200
    head = web.head("GET", "/v1/jobs", None, {"transfer-encoding": "chunked"})
    reader, writer = await web.connect()
    writer.write(head + f"0\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
    assert (await read_reply(reader)).status == 401
    writer.close()


async def test_requests_that_are_no_http_do_not_fill_the_log(
    web: Web, caplog: pytest.LogCaptureFixture
) -> None:
    upgrade = web.head("GET", "/livez", None, {"connection": "upgrade", "upgrade": "websocket"})
    with capture_logs() as lines, caplog.at_level("DEBUG", "uvicorn.error"):
        for sent in (b"no http at all\r\n\r\n", upgrade, b"CONNECT a:1 HTTP/1.1\r\n\r\n") * 5:
            reader, writer = await dial(web)
            writer.write(sent)
            async with asyncio.timeout(10):
                await read_head(reader)
            writer.close()
        await served(web, "127.0.0.1")
    ours = [line for line in lines if line["event"] == "bad_request"]
    assert [line["address"] for line in ours] == ["127.0.0.1"], "one a minute and address"
    assert not [each.getMessage() for each in caplog.records if each.name == "uvicorn.error"]


async def test_too_many_requests_at_once_end_their_connection(web: Web) -> None:
    reader, writer = await web.connect()
    writer.write(web.head("GET", "/livez") * 5_000)
    async with asyncio.timeout(10):
        answered = 0
        try:
            while await read_reply(reader):
                answered += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
    assert answered < 200
    writer.close()


@pytest.mark.parametrize("first", [HALF, b"\r\n\r\n"], ids=["half a request", "empty lines"])
async def test_a_head_that_does_not_end_times_out(site: Site, first: bytes) -> None:
    web = await site.web(head_timeout_ms=500)
    reader, writer = await web.connect()
    writer.write(first)
    is_refusal(await refusal((reader, writer)), 408, "head_timeout")


async def test_a_trickle_does_not_start_the_time_of_a_head_anew(site: Site) -> None:
    web = await site.web(head_timeout_ms=1_000)
    reader, writer = await web.connect()
    writer.write(HALF)
    begun = time.monotonic()
    refused = asyncio.create_task(refusal((reader, writer)))
    while not refused.done() and time.monotonic() - begun < 10:
        writer.write(b"0")
        await asyncio.sleep(0.1)  # the pace of the trickle
    is_refusal(await refused, 408, "head_timeout")
    assert time.monotonic() - begun < 5


async def test_connections_that_say_nothing_are_closed(site: Site) -> None:
    web = await site.web(head_timeout_ms=300, idle_timeout_s=1)
    silent, _one = await web.connect()
    idle, writer = await web.connect()
    writer.write(web.head("GET", "/livez"))
    assert (await read_reply(idle)).status == 200
    assert await is_cut(silent)
    assert await is_cut(idle)
    writer.close()


async def test_empty_lines_do_not_keep_an_idle_connection(site: Site) -> None:
    web = await site.web(head_timeout_ms=500)
    reader, writer = await web.connect()
    writer.write(web.head("GET", "/livez"))
    assert (await read_reply(reader)).status == 200
    writer.write(b"\r\n")
    is_refusal(await refusal((reader, writer)), 408, "head_timeout")


async def test_an_event_stream_outlives_the_timeouts(site: Site) -> None:
    """Also when its client sent bytes that begin no request."""
    web = await site.web(head_timeout_ms=200, body_timeout_ms=200, idle_timeout_s=1)
    job_id = await web.submit()
    following = await web.follow(job_id)
    following._writer.write(b"\r\n")
    await asyncio.sleep(3)  # longer than all of them
    await site.finish(await site.claim())
    assert [event.name for event in await following.all()][-1] == "done"


async def test_a_connection_serves_on_after_an_early_answer(site: Site) -> None:
    """The answer does not wait for the body; the rest of it is read and forgotten."""
    web = await site.web(anonymous=False, idle_timeout_s=1)
    reader, writer = await web.connect()
    body = b"x" * 100_000
    writer.write(web.head("POST", "/v1/jobs", body, {"content-type": "application/json"}))
    assert (await read_reply(reader)).status == 401
    writer.write(body + web.head("GET", "/livez"))
    async with asyncio.timeout(10):
        assert (await read_reply(reader)).status == 200
    assert await is_cut(reader), "idle as any other"
    writer.close()


async def test_a_body_that_nobody_reads_ends_its_connection(web: Web) -> None:
    """More of it than a client can have had under way when the answer came."""
    reader, writer = await web.connect()
    writer.write(web.head("GET", "/livez", None, {"content-length": "999999999"}))
    assert (await read_reply(reader)).status == 200
    begun = time.monotonic()
    assert await is_cut(reader)
    assert time.monotonic() - begun < 8
    writer.close()


async def test_an_answer_that_is_not_read_ends_its_connection(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_STALL_S", 0.5)
    gateway = await site.gateway()
    parts = urlsplit(gateway.url)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((parts.hostname, parts.port))
        asked = Web(gateway.url).head("GET", "/docs") * 90
        deaf.sendall(asked)

        open_now = gateway._server.server_state.connections

        async def stalled() -> bool:
            return any(each.flow.write_paused for each in open_now)

        async def cut() -> bool:
            return not open_now

        await until(stalled, within_s=15)
        await until(cut, within_s=15)


async def test_a_large_form_is_refused_before_it_is_read(site: Site) -> None:
    web = await site.web(anonymous=False)
    reader, writer = await web.connect()
    writer.write(web.head("POST", "/login", None, {**FORM, "content-length": "2000000"}))
    is_refusal(await refusal((reader, writer)), 413, "too_large")
    reader, writer = await web.connect()
    writer.write(web.head("POST", "/login", None, {**FORM, "transfer-encoding": "chunked"}))
    writer.write(b"4e20\r\n" + b"a" * 20_000 + b"\r\n")
    is_refusal(await refusal((reader, writer)), 413, "too_large")


async def test_a_form_without_a_session_is_answered_before_its_body(site: Site) -> None:
    web = await site.web(anonymous=False)
    reader, writer = await web.connect()
    own = {**FORM, "origin": web.url, "content-length": "1000"}
    writer.write(web.head("POST", "/ui/submit", None, own))
    async with asyncio.timeout(10):
        status, headers = await read_head(reader)
    assert (status, headers["location"]) == (303, "/login?next=%2F")
    writer.close()


async def test_the_size_of_a_form_and_its_fields_are_limited(site: Site) -> None:
    web = await site.web(form_bytes_max=20_000)
    own = {**FORM, "origin": web.url}
    reply = await web.send("POST", "/ui/submit", b"a" * 20_001, own)
    assert (reply.status, reply.json["code"]) == (413, "too_large")
    reply = await web.send("POST", "/ui/submit", b"a&" * 1_001, own)
    assert (reply.status, reply.json["code"]) == (422, "invalid")
    payload = b"queue=streams&task=chat&payload=%7B%22a%22%3A1%7D"
    assert (await web.send("POST", "/ui/submit", payload, own)).status == 303


async def test_a_form_that_comes_too_slowly_times_out(site: Site) -> None:
    web = await site.web(anonymous=False, body_timeout_ms=300)
    reader, writer = await web.connect()
    writer.write(web.head("POST", "/login", None, {**FORM, "content-length": "1000"}) + b"key=")
    is_refusal(await refusal((reader, writer)), 408, "body_timeout")


async def test_a_flood_from_one_address_leaves_room_for_others(site: Site) -> None:
    web = await site.web(connections_per_address=10)
    flood = await half_requests(web, "127.0.0.2", 40)
    assert await served(web, "127.0.0.1") == 200
    assert await served(web, "127.0.0.2") == 200, "in place of the one that waited longest"
    assert all([await is_cut(reader) for reader, _ in flood[:30]])
    for _, writer in flood:
        writer.close()


async def test_where_all_are_at_work_a_newcomer_is_refused_and_other_addresses_are_served(
    site: Site,
) -> None:
    web = await site.web(connections_per_address=3)
    job_id = await web.submit()
    streams = [await dial(web, "127.0.0.2") for _ in range(3)]
    for reader, writer in streams:
        writer.write(web.head("GET", f"/v1/jobs/{job_id}/events"))
        assert (await read_head(reader))[0] == 200
    reply = await refusal(await dial(web, "127.0.0.2"))
    is_refusal(reply, 503, "too_many_connections")
    assert reply.headers["retry-after"] == "1"
    assert await served(web, "127.0.0.1") == 200
    streams[0][1].close()

    async def room() -> bool:
        return await served(web, "127.0.0.2") == 200

    await until(room)
    for _, writer in streams:
        writer.close()


async def test_a_trusted_proxy_has_no_limit_of_its_own(site: Site) -> None:
    web = await site.web(connections_per_address=3, trusted_proxies=("127.0.0.0/30",))
    streams = [await dial(web, "127.0.0.2") for _ in range(10)]
    for reader, writer in streams:
        writer.write(web.head("GET", "/live"))
        assert (await read_head(reader))[0] == 200
    for _, writer in streams:
        writer.close()


async def test_when_all_connections_are_taken_the_largest_holder_gives_one_up(site: Site) -> None:
    web = await site.web(connections_max=12)
    [mine] = await half_requests(web, "127.0.0.1", 1)
    [other] = await half_requests(web, "127.0.0.3", 1)
    flood = await half_requests(web, "127.0.0.2", 20)
    assert await served(web, "127.0.0.4") == 200
    for reader, writer in (mine, other):
        writer.write(b".0.1\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await read_reply(reader)).status == 200
        writer.close()
    assert all([await is_cut(reader) for reader, _ in flood[:10]])
    for _, writer in flood:
        writer.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"head_bytes_max": 10}, "head_bytes_max is at least 8192"),
        ({"idle_timeout_s": 0}, "idle_timeout_s is at least 1"),
        ({"trusted_proxies": ("proxy.example",)}, "trusted_proxies"),
        ({"admin_address": "8081"}, "127.0.0.1:8081"),
        ({"admin_address": "127.0.0.1:8470"}, "a port of its own"),
    ],
)
def test_limits_that_cannot_be_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        GatewaySettings(queues=("memory://",), **settings)  # type: ignore[arg-type]


async def test_admins_have_an_address_of_their_own(site: Site) -> None:
    """What an admin or observer asks for is not found at the other one."""
    gateway = await site.gateway(admin_address="127.0.0.1:0")
    public, admin = Web(gateway.url), Web(gateway.admin_url)
    assert public.url != admin.url
    asked = [
        ("GET", "/metrics"),
        ("GET", "/"),
        ("GET", "/jobs"),
        ("GET", "/login"),
        ("GET", "/api/outboxes"),
        ("POST", "/api/queues/streams/pause"),
        ("POST", "/api/queues/streams/resume"),
        ("POST", "/api/bulk"),
        ("POST", "/ui/queue"),
    ]
    for method, path in asked:
        reply = await public.send(method, path)
        assert (reply.status, json.loads(reply.body)["code"]) == (404, "not_found"), path
        assert (await admin.send(method, path)).status != 404, path
    job_id = await public.submit()
    for web in (public, admin):
        assert (await web.get(f"/v1/jobs/{job_id}")).status == 200
        for path in ("/livez", "/readyz", "/docs"):
            assert (await web.get(path)).status == 200, path


async def test_an_admin_address_on_a_network_needs_a_key(site: Site) -> None:
    with pytest.raises(UsageError, match="tenure keys create"):
        await site.gateway(admin_address="0.0.0.0:0")
    ring = open_keyring(site.url())
    await ring.create(("admin",), "test")
    gateway = await site.gateway(admin_address="0.0.0.0:0")
    admin = Web(gateway.admin_url.replace("0.0.0.0", "127.0.0.1"))
    assert (await admin.get("/metrics")).status == 401
    await ring.close()


def test_newcomers_that_wait_together_are_accepted_together(redis_server: EmbeddedRedis) -> None:
    """One accept a turn of a busy loop kept newcomers out for as long as a flood lasted."""

    async def turns_for(count: int) -> int:
        settings = GatewaySettings(queues=(f"streams+{redis_server.url}",), port=0)
        async with serving(settings) as running:
            port = int(running.url.rpartition(":")[2])
            with contextlib.ExitStack() as stack:
                for _ in range(count):  # the kernel takes them; the loop does not turn meanwhile
                    stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                taken = running._server.server_state.connections
                turns = 0
                while len(taken) < count:
                    await asyncio.sleep(0)
                    turns += 1
            return turns

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(turns_for(64)) < 32
