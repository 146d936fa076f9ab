"""What a stranger sends is answered with a refusal: no route fails, and no secret is logged."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from tenure.core.errors import StoreUnreachable
from tenure.gateway.application import Gateway
from tenure.gateway.keyrings import open_keyring
from tenure.gateway.server import RunningGateway, serving
from tenure.gateway.settings import GatewaySettings
from tenure.worker.telemetry import configure_logs
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.web import Web

CANARY = "c4n4ry"
KEY = "tn_0123456789ab_" + CANARY + "0" * (64 - len(CANARY))
NINES = "9" * 5_000

COOKIES = [
    f"tenure_session={CANARY}",
    f"tenure_session=0123456789ab.{NINES}.{CANARY}",
    f"tenure_session=0123456789ab.9999999999.\xe9\xff{CANARY}",
    f"tenure_session=0123456789ab.\xb2\xb3.{CANARY}",
    "tenure_session=" + "A" * 43,
    "tenure_session=" + "\xff" * 43,
    'tenure_session="; tenure_session=\\; =; ;;;',
    "tenure_session" + "=" * 4_000,
    "a=" + '"\\' * 4_000,
    "; " * 4_000,
    "\x01\x02\x7f\x80=\x00",
    "$Version=1; tenure_session=[]; $Path=/",
]
HEADERS = [
    f"authorization: Bearer {KEY}",
    f"authorization: Bearer tn_{CANARY}\xff\xfe_\xff",
    f"authorization: Basic {CANARY}",
    "authorization: Bearer",
    "authorization: \xff",
    f"x-api-key: {KEY}",
    "x-api-key: " + "_" * 4_000,
    f"x-api-key: tn_0123456789\xb2\xb3_{'0' * 64}",
    "host: [",
    "host: [::1]:x\xff",
    "host: ",
    "origin: \xff://[",
    "sec-fetch-site: \xff",
    "content-length: 0\r\ncontent-type: \xff;;;=",
    "x-forwarded-user: root\r\nx-forwarded-groups: ops\r\nx-forwarded-for: \xff, [::, ,,,",
    "x-request-id: \xff\x01",
    f"last-event-id: {NINES}",
    f"idempotency-key: {CANARY}\x01\xff",
    "accept: \xff\r\naccept-encoding: \xff\r\naccept-language: \xff",
    "traceparent: 00-\xff-\xff-zz",
    "if-none-match: \xff\r\nrange: bytes=9-1,\xff",
]
QUERIES = [
    f"ticket={CANARY}",
    "ticket=%00%ff%",
    "&" * 4_000,
    "=" * 4_000,
    "%" * 2_000,
    "next=//evil.example&n=%00",
    f"limit={NINES[:400]}&before={NINES[:400]}&after=-1",
    "limit=1e400&limit=NaN&q=%ED%A0%80&cursor=%00",
    "q=" + "(" * 2_000,
    "q=is:%00+task:*+" + "x:" * 500,
    "queue=%F0%9F%92%A9&verbose&last_event_id=%ff",
    "[]=[&%5B%5D=%5B",
]
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"]
FORM = "application/x-www-form-urlencoded"
BODIES = [
    (FORM, f"key={KEY}".encode()),
    (FORM, b"key=" + b"%ff%00%" * 500),
    (FORM, b"&" * 12_000),
    (FORM, b"\xff\xfe\x00" * 1_000),
    (FORM, b"key=%ED%A0%80&next=%0d%0aset-cookie:x&next=/\\evil"),
    ("multipart/form-data; boundary=\xff", b"--\xff\r\n"),
    ("multipart/form-data", b"--"),
    ("application/json", b"[" * 20_000),
    ("application/json", b'{"task":"\\ud800","payload":{"a":1e400}}'),
    ("application/json", b'{"task":"\\u0000","payload":' + b"9" * 5_000 + b"}"),
    ("application/json", b'{"ids":["\\u0000"],"job_ids":[""],"action":"retry","q":"("}'),
    ("application/json", b'{"worker_id":"\\u0000","streams":["\xff"],"limit":-1}'),
    ("text/plain", b"\x00" * 1_000),
    ("", b"null"),
]
SEGMENTS = ["x", "%00", "%ff%fe", "..%2f..", "%F0%9F%92%A9", "a" * 2_000, "%"]


@pytest.fixture
def logs() -> Iterator[io.StringIO]:
    """Text logs as `tenure gateway` writes them on a terminal, where `rich` is installed."""
    import rich  # noqa: F401

    before = structlog.get_config()
    stream = io.StringIO()
    configure_logs(json=False, stream=stream, level="debug")
    yield stream
    structlog.configure(**before)


async def status_of(web: Web, method: str, target: str, head: str = "", body: bytes = b"") -> int:
    """The status that a request of exactly these bytes gets; 0 for a connection cut without one."""
    own = "" if head.startswith("host:") else f"host: {web.url.removeprefix('http://')}\r\n"
    size = "" if "content-length" in head else f"content-length: {len(body)}\r\n"
    lines = (
        f"{method} {target} HTTP/1.1\r\n{own}{size}{head}{chr(13) + chr(10) if head else ''}\r\n"
    )
    reader, writer = await web.connect()
    try:
        writer.write(lines.encode("latin-1") + body)
        async with asyncio.timeout(20):
            first = await reader.readline()
    except ConnectionError:
        return 0
    finally:
        writer.transport.abort()
    return int(first.split(b" ")[1]) if first else 0


def attacks(number: int) -> Iterator[tuple[str, str, str, bytes]]:
    """Method, query, header lines and body; half of them carry a key that is none."""
    key = f"x-api-key: {KEY}"
    for at, cookie in enumerate(COOKIES):
        yield "GET", "", f"cookie: {cookie}" + (f"\r\n{key}" if (at + number) % 2 else ""), b""
    for header in HEADERS:
        yield "GET", "", header, b""
    for at, query in enumerate(QUERIES):
        yield "GET", f"?{query}", key if (at + number) % 2 else "", b""
    for at, method in enumerate(METHODS):
        yield method, "", key if (at + number) % 2 else "", b""
    for at, (media, body) in enumerate(BODIES):
        own = "sec-fetch-site: same-origin\r\n" if at % 2 else ""
        method = "PUT" if (at + number) % 7 == 0 else "POST"
        media_line = f"content-type: {media}" if media else "accept: */*"
        yield method, "", own + media_line + (f"\r\n{key}" if (at + number) % 2 else ""), body


def paths(gateway: Gateway) -> list[str]:
    """Every path there is, parameters replaced by what is no id."""
    import json

    api = json.loads(gateway.openapi)["paths"]
    pages = [route.path for route in gateway.dashboard.routes()]
    known = [*api, *pages, "/docs", "/openapi.json", "/asyncapi.json", "/none/such", "//", "/%00"]
    found = []
    for at, path in enumerate(dict.fromkeys(known)):
        while "{" in path:
            before, _, rest = path.partition("{")
            path = before + SEGMENTS[at % len(SEGMENTS)] + rest.partition("}")[2]
            at += 1
        found.append(path)
    return found


@pytest.fixture(params=["keys", "open"])
async def running(
    request: pytest.FixtureRequest, site: Site, tmp_path: Path
) -> AsyncGenerator[RunningGateway]:
    """All kinds of HTTP routes, behind keys and, on loopback, open to local programs."""
    if request.param == "keys":
        ring = open_keyring(site.url())
        await ring.create(["admin"], "admin")
        await ring.close()
    files = [f"{contract}+sqlite:///{tmp_path}/{contract}.db" for contract in ("inbox", "plane")]
    settings: dict[str, Any] = {
        "queues": (site.url(), *files),
        "port": 0,
        "failed_logins_per_min": 0,  # with a limit most of this would end at it
        "streams_per_key": 10_000,
    }
    async with serving(GatewaySettings(**settings)) as gateway:
        while await _keys_are_away(gateway):
            await asyncio.sleep(0.1)  # a poll: a new database on a busy machine takes its time
        yield gateway


async def _keys_are_away(running: RunningGateway) -> bool:
    try:
        await running.gateway.ring.count()
    except StoreUnreachable:
        return True
    return False


@pytest.mark.timeout(300)
async def test_nothing_that_a_stranger_sends_fails_or_is_logged(
    running: RunningGateway, logs: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    web = Web(running.url)
    failed, sent = [], 0
    for number, path in enumerate(paths(running.gateway)):
        for method, query, head, body in attacks(number):
            status = await status_of(web, method, path + query, head, body)
            sent += 1
            if status >= 500 or status == 0:
                failed.append((status, method, path[:80], query[:80], head[:80], body[:80]))
    assert sent > 3_000
    assert not failed, (len(failed), failed[:20])
    text = logs.getvalue() + caplog.text
    assert CANARY not in text
    assert "Traceback" not in text


async def test_logins_that_are_broken_off_cost_the_others_nothing(
    site: Site, logs: io.StringIO
) -> None:
    """Each was once an error with all local variables in the log: a second of the event loop."""
    web = await site.web(anonymous=False)
    begun = time.perf_counter()
    for _ in range(20):
        _reader, writer = await web.connect()
        head = web.head("POST", "/login", b"x" * 1_000, {"content-type": FORM})
        writer.write(head + f"key={KEY}".encode())
        await writer.drain()
        writer.transport.abort()
    for _ in range(20):
        assert (await web.get("/livez")).status == 200
    assert time.perf_counter() - begun < 5  # it took 22 seconds
    assert "request_failed" not in logs.getvalue()
    assert CANARY not in logs.getvalue()


async def test_a_fault_of_our_own_is_logged_without_local_variables(
    site: Site, logs: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await site.gateway(anonymous=False)

    async def fails(*_: object, **__: object) -> None:
        secret = KEY
        raise RuntimeError(f"a fault of {len(secret)} letters")

    monkeypatch.setattr(running.gateway.ring, "find", fails)
    begun = time.perf_counter()
    reply = await Web(running.url).get("/v1/jobs", x_api_key=KEY)
    assert reply.status == 500
    assert time.perf_counter() - begun < 1
    text = logs.getvalue()
    assert "a fault of 80 letters" in text
    assert "in fails" in text
    assert CANARY not in text
    assert len(text) < 12_000
