"""Whatever a stranger or a client sends, the gateway answers it, and never with a 5xx."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from urllib.parse import quote_from_bytes

import msgspec
import pytest

from tenure.cli.config import Config
from tenure.cli.keys import open_seal
from tenure.egress import Guard
from tenure.gateway.keyrings import open_keyring
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tenure.vault import new_kek
from tests.contract.adapters import Servers
from tests.contract.gateway.web import Web
from tests.fuzz.budget import REST, SECONDS, SEED, TIMEOUT_S
from tests.fuzz.junk import junk

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)
ANSWER_WITHIN_S = 10
MORE_COMES_S = 1


@dataclass(frozen=True)
class Site:
    """A gateway of all contracts, two keys, and the headers of a browser that signed in."""

    url: str
    admin: str
    plain: str
    session: bytes


@pytest.fixture
async def site(servers: Servers, tmp_path: Path) -> AsyncGenerator[Site]:
    inbox = f"inbox+sqlite:///{tmp_path}/jobs.db?synchronous=normal"
    ring = open_keyring(inbox)
    _, admin = await ring.create(("admin",), "fuzzer")
    _, plain = await ring.create(("jobs:read", "jobs:write"), "stranger")
    await ring.close()
    name = f"fuzz{os.getpid()}"
    queues = (
        f"streams+{servers.redis()}?namespace={name}:",
        f"bullmq+{servers.redis()}?queue={name}-b",
        f"omniq+{servers.redis()}?queue={name}-o",
        inbox,
        f"plane+sqlite:///{tmp_path}/jobs.db?synchronous=normal",
    )
    seal = open_seal(Config({"TENURE_VAULT_KEYS": new_kek("fuzz")}, tmp_path))
    lent = {"seal": seal, "check_url": Guard().check_url}
    settings = GatewaySettings(queues=queues, port=0, rate_per_s=0, route_options=lent)
    async with serving(settings) as running:
        yield Site(running.url, admin, plain, await signed_in(running.url, admin))


async def signed_in(url: str, key: str) -> bytes:
    """The headers of a browser after the form of /login."""
    form, host = f"key={key}".encode(), url.removeprefix("http://")
    head = f"POST /login HTTP/1.1\r\nhost: {host}\r\norigin: {url}\r\nconnection: close\r\n"
    kind = f"content-type: application/x-www-form-urlencoded\r\ncontent-length: {len(form)}"
    answer = await answered(url, f"{head}{kind}\r\n\r\n".encode() + form, ANSWER_WITHIN_S)
    (cookie,) = re.findall(rb"set-cookie: ([^;]+);", answer)
    return b"cookie: %s\r\nhost: %s\r\norigin: %s" % (cookie, host.encode(), url.encode())


@pytest.mark.timeout(TIMEOUT_S)
async def test_chains_of_calls_by_the_document_end_in_no_server_error(
    site: Site, tmp_path: Path
) -> None:
    """schemathesis makes requests of the document, right and wrong ones, and follows its links."""
    words = ("fuzz", f"{site.url}/openapi.json", "--max-time", str(SECONDS), "--checks", CHECKS)
    more = ("--seed", str(SEED), "--header", f"Authorization: Bearer {site.admin}", "--no-color")
    # Streams of events and long polls answer when something happens.
    more += ("--exclude-path-regex", "/events$|/claim$|/news$|/watch", "--request-timeout", "20")
    program = Path(sys.executable).with_name("st")
    said = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        program, *words, *more, cwd=tmp_path, stdout=said, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-6_000:]
    assert (await Web(site.url).get("/livez")).status == 200


HEADERS = (
    b"cookie", b"cookie", b"authorization", b"content-type", b"content-length", b"content-encoding",
    b"accept", b"accept-encoding", b"host", b"origin", b"referer", b"sec-fetch-site", b"expect",
    b"last-event-id", b"x-api-key", b"idempotency-key", b"traceparent", b"if-none-match", b"range",
    b"transfer-encoding", b"forwarded", b"x-forwarded-for", b"via", b"x-request-id", b"hx-request",
    b"upgrade", b"connection",
)  # fmt: skip
METHODS = (b"PUT", b"PATCH", b"DELETE", b"HEAD", b"OPTIONS", b"TRACE", b"get", b"X")
PAGES = (
    "/", "/login", "/logout", "/jobs", "/jobs/confirm", "/jobs/{queue}/{job_id}", "/queues",
    "/workers", "/dead", "/outbox", "/history", "/audit", "/bulk/{bulk_id}", "/ui/act", "/ui/bulk",
    "/ui/bulk/stop", "/ui/queue", "/ui/redeliver", "/ui/submit", "/ui/replay", "/static/{digest}/x",
    "/live", "/livez", "/readyz", "/metrics",
)  # fmt: skip
NAMES = (
    "after",
    "before",
    "limit",
    "q",
    "queue",
    "state",
    "cursor",
    "since",
    "count",
    "ticket",
    "n",
)


class Sender:
    """Makes requests that are HTTP in the main and wrong in some part."""

    def __init__(self, site: Site, paths: list[str], rng: Random) -> None:
        self._site = site
        self._paths = paths
        self._rng = rng

    def request(self) -> bytes:
        rng = self._rng
        body = self._body() if rng.random() < 0.6 else b""
        keys = (self._site.plain, self._site.admin, "no-key")
        key = b"host: 127.0.0.1\r\nauthorization: Bearer " + rng.choice(keys).encode()
        lines = [self._line(), b"connection: close", rng.choice((key, key, self._site.session))]
        if body:
            media = rng.choice((b"application/json", b"application/x-www-form-urlencoded"))
            lines += [b"content-type: " + media, b"content-length: %d" % len(body)]
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            at = rng.randrange(1, len(lines) + 1)
            lines.insert(at, rng.choice(HEADERS) + b": " + self._junk())
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    def _line(self) -> bytes:
        rng = self._rng
        path = rng.choice(self._paths)
        while "{" in path:
            head, _, rest = path.partition("{")
            path = head + self._quoted() + rest.partition("}")[2]
        if rng.random() < 0.6:
            names = (
                "after",
                "limit",
                "q",
                "queue",
                "state",
                "cursor",
                "since",
                "count",
                "ticket",
                "n",
            )
            query = [f"{rng.choice(names)}={self._quoted()}" for _ in range(rng.randint(1, 3))]
            path += "?" + "&".join(query)
        method = rng.choice(METHODS) if rng.random() < 0.3 else rng.choice((b"GET", b"POST"))
        return method + b" " + path.encode() + b" HTTP/1.1"

    def _quoted(self) -> str:
        """Most bytes by their percent codes, so that they reach the application."""
        return quote_from_bytes(self._junk()[:6_000], safe="")

    def _body(self) -> bytes:
        rng = self._rng
        chance = rng.random()
        if chance < 0.3:
            return b"&".join(self._junk() + b"=" + self._junk() for _ in range(rng.randint(1, 20)))
        if chance < 0.7:
            names = ("task", "payload", "job_id", "queue", "key", "delay_ms", "source", "outputs")
            parts = [f'"{rng.choice(names)}": '.encode() + self._value() for _ in range(3)]
            return b"{" + b", ".join(parts) + b"}"
        return self._junk()

    def _value(self) -> bytes:
        text, deep = self._junk(), b"[" * 200 + b"]" * 200
        return self._rng.choice((text, b'"' + text + b'"', deep, b"1e400", b"-0.0", b"{}", b"true"))

    def _junk(self) -> bytes:
        return junk(self._rng).replace(b"\n", b"").replace(b"\r", b"")


async def answered(url: str, request: bytes, whole_within_s: float = MORE_COMES_S) -> bytes:
    """The head of the answer; nothing where the connection was closed without one."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    async with asyncio.timeout(ANSWER_WITHIN_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request)
            try:
                return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), whole_within_s)
            except TimeoutError:  # a body shorter than its header says: the gateway waits for more
                writer.write_eof()
                return await reader.readuntil(b"\r\n\r\n")
        except (ConnectionError, asyncio.IncompleteReadError):
            return b""
        finally:
            writer.transport.abort()


@pytest.mark.timeout(TIMEOUT_S)
async def test_requests_that_are_wrong_in_some_part_are_answered_and_never_by_a_server_error(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "uvicorn.error")  # it warns of each request that is not HTTP
    document = msgspec.json.decode((await Web(site.url).get("/openapi.json")).body)
    sender = Sender(site, [*document["paths"], *PAGES], Random(SEED))
    ends = time.monotonic() + SECONDS
    wrong: list[tuple[str, bytes]] = []
    seen: Counter[str] = Counter()
    while time.monotonic() < ends and len(wrong) < 5:
        round_began = time.thread_time()
        requests = [sender.request() for _ in range(8)]
        answers = await asyncio.gather(
            *(answered(site.url, request) for request in requests), return_exceptions=True
        )
        for request, answer in zip(requests, answers, strict=True):
            status = answer[9:12].decode() if isinstance(answer, bytes) else repr(answer)
            seen[status] += 1
            if status and not status.startswith(("1", "2", "3", "4")):
                wrong.append((status, request[:2_000]))
        await asyncio.sleep(REST * (time.thread_time() - round_began))
    print(dict(seen))
    assert not wrong, wrong
    assert {"200", "303", "400", "401", "404", "405", "415", "422"} <= seen.keys()
    assert (await Web(site.url).get("/livez")).status == 200
