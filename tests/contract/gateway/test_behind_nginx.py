"""The reverse proxy of docs/operating/security.md: a real nginx in front of a real gateway."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from tenure.gateway.keyrings import open_keyring
from tests.contract.cli.pages import ROOT, page
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.web import Web, read_head, read_reply
from tests.ports import free_port
from tests.waiting import until

PAGE = "docs/operating/security.md"
NAME = "jobs.example.com"
AROUND = """\
daemon off;
master_process off;
pid {folder}/pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/tenure.conf;
}}
"""


@dataclass(frozen=True)
class Proxy:
    """A running nginx, and how its clients reach it."""

    plain: int
    tls: int
    trust: ssl.SSLContext

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            "127.0.0.1", self.tls, ssl=self.trust, server_hostname=NAME
        )

    async def send(self, line: str, *headers: str, body: bytes = b"") -> tuple[int, str, bytes]:
        """Status, head and body of the answer."""
        reader, writer = await self.connect()
        try:
            writer.write(request(line, *headers, body=body))
            head = await reader.readuntil(b"\r\n\r\n")
            return int(head.split()[1]), head.decode().lower(), await reader.read(100_000)
        finally:
            writer.transport.abort()


def request(line: str, *headers: str, body: bytes = b"") -> bytes:
    head = [f"{line} HTTP/1.1", f"host: {NAME}", "connection: close", *headers]
    if body:
        head += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*head, "", ""]).encode() + body


@pytest.fixture
async def nginx(tmp_path: Path) -> AsyncGenerator[Callable[[str], Awaitable[Proxy]]]:
    """Starts it with the page's configuration in front of a gateway's URL."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:{ROOT / '.tools'}")
    assert program, "no nginx on PATH nor in .tools: bin/test brings it"
    started: list[asyncio.subprocess.Process] = []

    async def start(url: str) -> Proxy:
        authority = trustme.CA()
        issued = authority.issue_cert(NAME)
        issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
        issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
        plain, tls = free_port(), free_port()
        (text,) = [block.text for block in page(PAGE).blocks if block.language == "nginx"]
        for documented, here in (
            ("listen 80", f"listen 127.0.0.1:{plain}"),
            ("listen 443", f"listen 127.0.0.1:{tls}"),
            (f"/etc/nginx/tls/{NAME}.crt", f"{tmp_path}/cert.pem"),
            (f"/etc/nginx/tls/{NAME}.key", f"{tmp_path}/key.pem"),
            ("127.0.0.1:8470", url.removeprefix("http://")),
        ):
            assert documented in text
            text = text.replace(documented, here)
        (tmp_path / "tenure.conf").write_text(text)
        (tmp_path / "nginx.conf").write_text(AROUND.format(folder=tmp_path))
        command = (program, "-e", "stderr", "-p", tmp_path, "-c", tmp_path / "nginx.conf")
        started.append(await asyncio.create_subprocess_exec(*command))
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        proxy = Proxy(plain, tls, trust)

        async def answers() -> bool:
            assert started[0].returncode is None, "nginx did not start; its words are above"
            try:
                return (await proxy.send("GET /livez"))[0] == 200
            except OSError:
                return False

        await until(answers, within_s=20)
        return proxy

    yield start
    for process in started:
        process.terminate()
        await process.wait()


@pytest.mark.runs("docs/operating/security.md:nginx")
async def test_jobs_go_through_tls_and_their_events_arrive_one_by_one(
    site: Site, nginx: Callable[[str], Awaitable[Proxy]]
) -> None:
    ring = open_keyring(site.url())
    _, key = await ring.create(("jobs:read", "jobs:write"), "client")
    await ring.close()
    proxy = await nginx((await site.gateway()).url)
    bearer = f"authorization: Bearer {key}"
    body = b'{"task": "chat", "payload": {"prompt": "hi"}}'
    status, head, said = await proxy.send("POST /v1/jobs", bearer, body=body)
    assert status == 202
    assert "strict-transport-security: max-age=31536000" in head
    job_id = said.decode().partition('"job_id":"')[2].partition('"')[0]
    reader, writer = await proxy.connect()
    writer.write(request(f"GET /v1/jobs/{job_id}/events", bearer))
    status, _ = await read_head(reader)
    assert status == 200

    async def arrives(word: bytes) -> None:
        async with asyncio.timeout(10):
            await reader.readuntil(word)

    # Each event is read before the next one is made: nothing on the way waits for more.
    await arrives(b"queued")
    lease = await site.claim()
    for step in ("scene.one", "scene.two"):
        await site.tell(lease, step)
        await arrives(step.encode())
    await site.finish(lease)
    await arrives(b"event: done")
    writer.transport.abort()


async def test_what_a_client_says_about_its_way_does_not_reach_the_gateway(
    nginx: Callable[[str], Awaitable[Proxy]],
) -> None:
    heads: list[str] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
        writer.close()

    async with await asyncio.start_server(note, "127.0.0.1", 0) as gateway:
        proxy = await nginx(f"127.0.0.1:{gateway.sockets[0].getsockname()[1]}")
        said = ("x-forwarded-for: 8.8.8.8", "forwarded: for=8.8.8.8", "remote-user: root")
        more = (
            "x-forwarded-user: root",
            "x-forwarded-email: a@b.example",
            "x-forwarded-proto: http",
        )
        await proxy.send("GET /v1/jobs", *said, *more)
    lines = heads[-1].split("\r\n")
    assert [line for line in lines if "forwarded" in line or "user" in line] == [
        "x-forwarded-for: 127.0.0.1",
        "x-forwarded-proto: https",
        f"x-forwarded-host: {NAME}",
    ]
    assert f"host: {NAME}" in lines


async def test_a_gateway_without_keys_is_not_opened_by_the_proxy(
    site: Site, nginx: Callable[[str], Awaitable[Proxy]]
) -> None:
    gateway = await site.gateway()
    proxy = await nginx(gateway.url)
    assert (await Web(gateway.url).get("/v1/jobs/none")).status == 404, "it is open to this machine"
    status, _, said = await proxy.send("GET /v1/jobs/none")
    assert status == 401
    assert b"needs API keys" in said


async def test_large_bodies_unknown_names_plain_http_and_metrics_stop_at_the_proxy(
    site: Site, nginx: Callable[[str], Awaitable[Proxy]]
) -> None:
    proxy = await nginx((await site.gateway()).url)
    status, _, _ = await proxy.send("POST /v1/jobs", body=b" " * (9 << 20))
    assert status == 413
    assert (await proxy.send("GET /metrics"))[0] == 403
    stranger = ssl.create_default_context()
    with pytest.raises(ssl.SSLError):
        await asyncio.open_connection(
            "127.0.0.1", proxy.tls, ssl=stranger, server_hostname="elsewhere.example"
        )
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.plain)
    writer.write(request("GET /jobs?a=b"))
    reply = await read_reply(reader)
    writer.close()
    assert (reply.status, reply.headers["location"]) == (301, f"https://{NAME}/jobs?a=b")
