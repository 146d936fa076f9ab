"""Secrets of a request, each a canary: where bytes lie afterwards, none of them is found.

A gateway and a worker run as programs of their own, the stores are real, and so are the places that
ask for the secrets: a job that succeeds proves that the worker opened them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest

from tenure.core.registry import open_journal
from tenure.gateway.keyrings import open_keyring
from tenure.vault import new_kek
from tests.contract.gateway.web import JSON, Reply, Web
from tests.contract.inbox.conftest import RawSql
from tests.contract.inbox_stage import InboxStage
from tests.contract.transcode.bucket import S3Server
from tests.contract.transcode.conftest import clip
from tests.contract.webhooks.receiver import Receiver, receiver
from tests.ports import free_port
from tests.waiting import until

__all__ = ["clip"]

CANARY = "canary7f3b"
S3_KEY = (f"AKID{CANARY}id", f"{CANARY}s3secret")
USER, PASSWORD = f"{CANARY}user", f"{CANARY}password"
POSTER = [{"name": "poster.jpg", "format": "jpg"}]


class Media(ThreadingHTTPServer):
    """Serves a clip and takes uploads, to those who show the signature or the password."""

    def __init__(self, file: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Asked)
        self.file = file
        self.uploads: dict[str, int] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Asked(BaseHTTPRequestHandler):
    server: Media

    def do_GET(self) -> None:
        body = self.server.file if self._admitted() else b""
        self._answer(200 if body else 403, body)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self._admitted():
            self.server.uploads[urlsplit(self.path).path] = len(body)
        self._answer(200 if self._admitted() else 403, b"")

    def _admitted(self) -> bool:
        basic = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        signed = parse_qs(urlsplit(self.path).query).get("X-Amz-Signature", [""])[0]
        return signed == f"{CANARY}signature" or self.headers["Authorization"] == f"Basic {basic}"

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its own name
        pass


@pytest.fixture
def media(clip: Path) -> Generator[Media]:
    server = Media(clip.read_bytes())
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def bucket(tmp_path: Path, clip: Path) -> Generator[S3Server]:
    folder = tmp_path / "s3"
    for name in ("in", "out"):
        (folder / name).mkdir(parents=True)
    (folder / "in" / "clip.mp4").write_bytes(clip.read_bytes())
    server = S3Server(folder)
    server.start(S3_KEY)
    yield server
    server.stop()


@asynccontextmanager
async def running(inbox: InboxStage, folder: Path) -> AsyncGenerator[Web]:
    """A gateway and a worker that tell all they can; their words go to `*.log`."""
    outbox, port = f"{inbox.url}&box=outbox", free_port()
    told = {
        "TENURE_VAULT_KEYS": new_kek("canaries"),
        "TENURE_EGRESS_ALLOW": "127.0.0.1/32",
        "TENURE_TRANSCODE_FOLDER": str(folder / "work"),
    }
    ring = open_keyring(inbox.url)
    key, text = await ring.create(("jobs:write", "jobs:read", "observe"), "canaries")
    level = ("--log-level", "debug")
    programs = {
        "gateway": ("gateway", "--port", str(port), "--queue", inbox.url, *level),
        "worker": ("worker", "tenure.transcode", "--queue", inbox.url, "--queue", outbox, *level),
    }
    started = []
    for name, words in programs.items():
        with (folder / f"{name}.log").open("wb") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tenure.cli", *words],
                    env=os.environ | told,
                    stdout=log,
                    stderr=log,
                )
            )
    web = Web(f"http://127.0.0.1:{port}", {"authorization": f"Bearer {text}"})

    async def ready() -> bool:
        try:
            return (await web.get("/readyz")).status == 200
        except OSError:
            return False

    try:
        await until(ready, within_s=60)
        yield web
    finally:
        for program in started:
            program.terminate()
        for program in started:
            await asyncio.to_thread(program.wait, 30)
        await ring.revoke(key.id)
        await ring.close()


def requests(media: Media, bucket: S3Server, hook: str) -> dict[str, dict[str, Any]]:
    """A secret in every place that may have one; most of these can be done."""
    signed = f"X-Amz-Credential={CANARY}scope&X-Amz-Signature={CANARY}signature"
    keys = {"access_key_id": S3_KEY[0], "secret_access_key": S3_KEY[1]}
    to_bucket = {"url": "s3://out/films", "endpoint": bucket.endpoint}
    host = media.origin.removeprefix("http://")
    common = {"outputs": POSTER, "status_webhook_url": hook, "max_attempts": 1}
    return {
        "presigned": common
        | {
            "source": {"url": f"{media.origin}/clip.mp4?{signed}"},
            "destination": to_bucket,
            "credentials": {"destination": keys},
        },
        "password": common
        | {
            "source": {"url": f"http://{USER}:{PASSWORD}@{host}/clip.mp4"},
            "credentials": {
                "destination": {"signed_urls": {"poster.jpg": f"{media.origin}/up/a?{signed}"}}
            },
        },
        "keys in the URL": common
        | {
            "source": {
                "url": f"s3://{S3_KEY[0]}:{S3_KEY[1]}@in/clip.mp4",
                "endpoint": bucket.endpoint,
            },
            "destination": to_bucket,
            "credentials": {"destination": keys},
        },
        "refused": common
        | {
            "source": {"url": f"{media.origin}/clip.mp4?X-Amz-Signature={CANARY}wrong"},
            "destination": to_bucket,
            "credentials": {"destination": keys | {"session_token": f"{CANARY}session"}},
        },
        "unreachable": common
        | {
            "source": {"url": f"http://127.0.0.1:{free_port()}/clip.mp4?token={CANARY}token"},
            "destination": to_bucket,
            "credentials": {"destination": keys},
        },
    }


REFUSED: list[dict[str, Any]] = [
    {"source": {"url": "s3://in/a", "secret_access_key": f"{CANARY}nested"}},
    {"outputs": [{"name": "a.jpg", "format": "jpg", "upload_url": f"https://x/?{CANARY}"}]},
    {"status_webhook_url": f"http://127.0.0.1/hook?token={CANARY}hook"},
    {"refresh_url": f"http://{USER}:{PASSWORD}@127.0.0.1/refresh"},
    {"destination": {"url": f"s3://out?key={CANARY}"}},
    *(
        {side: {"url": url, "endpoint": endpoint}}
        for endpoint in (
            f"http://{USER}:{PASSWORD}@127.0.0.1:9000",
            f"http://127.0.0.1:9000/?sig={CANARY}",
            CANARY,
        )
        for side, url in (
            ("source", "s3://in/a"),
            ("source", "http://127.0.0.1/clip.mp4"),
            ("source", "file:///media/clip.mp4"),
            ("destination", "s3://out"),
            ("destination", "file:///media"),
        )
    ),
]


@pytest.mark.timeout(240)
@pytest.mark.clause("I-52", "I-71", "I-72")
@pytest.mark.options(lease_ms=10_000)
async def test_no_secret_of_a_request_is_found_in_any_byte_that_is_kept(
    inbox: InboxStage, media: Media, bucket: S3Server, sql: RawSql, tmp_path: Path
) -> None:
    found: list[bytes] = []
    async with running(inbox, tmp_path) as web, receiver([]) as there:
        made = await web.post("/transcode/webhook-secret")
        there.secrets.append(made.json["secret"])
        jobs = {}
        for name, body in requests(media, bucket, there.url).items():
            reply = await post(web, body, name)
            assert reply.status == 202, (name, reply.body)
            jobs[name] = reply.json["job_id"]
        plain = {"source": {"url": "s3://in/a"}, "destination": {"url": "s3://out"}}
        for wrong in REFUSED:
            assert (await post(web, plain | {"outputs": POSTER} | wrong)).status == 422
        ended = {name: await end_of(web, job_id) for name, job_id in jobs.items()}
        assert {name: each["status"] for name, each in ended.items()} == {
            "presigned": "succeeded",
            "password": "succeeded",
            "keys in the URL": "succeeded",
            "refused": "dead_letter",
            "unreachable": "dead_letter",
        }, ended
        assert media.uploads.keys() == {"/up/a"}
        await all_delivered(inbox, there, list(jobs.values()))
        for job_id in jobs.values():
            found.append((await web.get(f"/api/queues/{queue_of(inbox)}/jobs/{job_id}")).body)
            found.append((await web.get(f"/transcode/status?job_id={job_id}")).body)
        found += [msgspec.json.encode(one.event) for one in there.deliveries]
        found += [json.dumps(head).encode() for head in there.heads]
        journal = open_journal(inbox.url)
        found.append(msgspec.json.encode(await journal.read(limit=10_000)))
        await journal.close()
        places = [b"".join(found), *stored(inbox), *await server_files(inbox, sql)]
    places += [(tmp_path / f"{name}.log").read_bytes() for name in ("gateway", "worker")]
    assert any(next(iter(jobs.values())).encode() in place for place in places[1:])
    for place in places:
        at = place.find(CANARY.encode())
        assert at < 0, place[max(0, at - 300) : at + 60]
    left = await sql(
        "SELECT count(*) FROM inbox_jobs WHERE storage_creds_encrypted IS NOT NULL AND queue = ?",
        queue_of(inbox),
    )
    assert left[0][0] == 0, "credentials end with their job"


async def post(web: Web, body: Any, key: str = "") -> Reply:
    named = {"idempotency-key": f"{CANARY[:3]}-{key}"} if key else {}
    return await web.send("POST", "/transcode", json.dumps(body).encode(), {**JSON, **named})


async def end_of(web: Web, job_id: str) -> dict[str, Any]:
    async def ended() -> bool:
        status = (await web.get(f"/transcode/status?job_id={job_id}")).json["status"]
        return status in ("succeeded", "dead_letter")

    await until(ended, within_s=60)
    return dict((await web.get(f"/transcode/status?job_id={job_id}")).json)


async def all_delivered(inbox: InboxStage, there: Receiver, jobs: list[str]) -> None:
    """Each job's last event has arrived."""

    def told() -> bool:
        last = {one.event["job_id"] for one in there.deliveries if one.event["status"] in ENDS}
        return last == set(jobs)

    await until(told, within_s=60)


ENDS = ("succeeded", "dead_letter")


def queue_of(inbox: InboxStage) -> str:
    return parse_qs(urlsplit(inbox.url).query).get("queue", ["inbox"])[0]


def stored(inbox: InboxStage) -> list[bytes]:
    """The bytes of the SQLite file and of its log."""
    parts = urlsplit(inbox.url.removeprefix("inbox+"))
    if parts.scheme != "sqlite":
        return []
    files = sorted(Path(parts.path[1:]).parent.iterdir())
    assert any(file.name.endswith("-wal") for file in files)
    return [file.read_bytes() for file in files if file.is_file()]


async def server_files(inbox: InboxStage, sql: RawSql) -> list[bytes]:
    """Tables and write-ahead log of the PostgreSQL server, as its files hold them."""
    if "+sqlite" in inbox.url:
        return []
    await sql("CHECKPOINT")
    folder = Path((await sql("SELECT current_setting('data_directory')"))[0][0])
    kept = [*folder.glob("base/*/*"), *folder.glob("pg_wal/*")]
    return [file.read_bytes() for file in kept if file.is_file()]
