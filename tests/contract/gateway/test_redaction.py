"""Canaries in everything a job carries: no route and no event shows one to another key."""

from __future__ import annotations

import asyncio
import json
import secrets
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import closing
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from tenure.core.job import NewJob
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Failure, Outcome
from tenure.core.registry import open_queue
from tenure.dashboard.display import job_path
from tenure.gateway.keys import Key, MemoryKeyRing
from tenure.gateway.server import RunningGateway, serving
from tenure.gateway.settings import GatewaySettings
from tenure.sql.sqlite_engine import SqliteEngine
from tenure.store.redis import Redis
from tests.contract.adapters import Servers, Stage, adapters, served_url
from tests.contract.gateway.test_observing import FORM, SERVED
from tests.contract.gateway.web import Following, Web

_STREAMED = ("streams", "plane")
_HAS_OWNER = ("streams", "plane", "inbox", "omniq")  # a job of BullMQ has no requester
_NO_JOBS = ("/openapi.json", "/asyncapi.json", "/docs", "/metrics", "/livez", "/readyz")


class Canaries(list[str]):
    """Values that may appear nowhere."""

    def one(self) -> str:
        self.append(f"cnry{secrets.token_hex(8)}")
        return self[-1]

    def value(self) -> dict[str, Any]:
        """A value with one in every place where a secret is recognised."""
        one = self.one
        return {
            "n": 1,
            "password": one(),
            "nested": {"list": [{"apiKey": one()}, [{"X-Session": one()}]]},
            "credentials": {"user": one(), "more": [one()]},
            "headers": [["Authorization", one()], {"name": "Cookie", "value": one()}],
            "url": f"https://u:{one()}@h.example/p?a=1&access_token={one()}#sig={one()}",
            "dsn": one(),
            "body": json.dumps({"aws_secret_access_key": one(), "in": json.dumps({"jwt": one()})}),
            "text": f"tried postgres://a:{one()}@b with Bearer {one()} and api_key={one()}",
            "form": f"a=b&client_secret={one()}&api%255Fkey={one()}",
            "xml": f'<add key="password" value="{one()}"/><token><![CDATA[<{one()}]]></token>',
            "pass\u200bword": one(),
            "wide": dict.fromkeys("abcdefghijklmnopqr", 1) | {"name": "dsn", "value": one()},
        }

    def raw(self) -> bytes:
        return json.dumps(self.value()).encode()

    def failure(self) -> Failure:
        return Failure(
            code="LoginFailed",
            message=f"password={self.one()} was refused by https://u:{self.one()}@h.example",
            stack=f"line 1: connect(token='{self.one()}')",
        )

    def check(self, text: bytes | str, where: str) -> None:
        shown = text if isinstance(text, str) else text.decode()
        assert not [each for each in self if each in shown], (where, shown)


class Scene:
    """Jobs of one contract in all states, submitted by one key, behind a gateway with keys."""

    def __init__(self, stage: Stage, running: RunningGateway, contract: str) -> None:
        self.stage, self.running, self.contract = stage, running, contract
        self.queue = running.gateway.queues[0].name
        self.worker = stage.queue("w1")
        self.canaries = Canaries()
        self.owner: Key
        self.by: dict[str, Web] = {}
        self.jobs: dict[str, str] = {}

    async def submit(self, name: str, payload: bytes) -> None:
        new = NewJob(task="a", payload=payload, requester=self.owner.id)
        (made,) = await self.stage.queue().submit([new])
        assert made.accepted, made
        self.jobs[name] = made.job_id

    async def claim(self) -> Lease:
        (lease,) = await self.worker.claim(1, wait_ms=5_000)
        return lease

    async def report(self, lease: Lease) -> None:
        told = Report(lease=lease, data=self.canaries.raw(), progress=self.canaries.raw())
        assert await self.worker.report([told]) == [None]

    async def fill(self) -> Lease:
        """The lease of the job that still runs is returned."""
        for name in ("done", "failed", "running", "waiting"):
            await self.submit(name, self.canaries.raw())
            if name == "waiting":
                continue
            lease = await self.claim()
            await self.report(lease)
            if name == "done":
                await self.worker.settle([Outcome(lease, "complete", self.canaries.raw())])
            elif name == "failed":
                failure = self.canaries.failure()
                await self.worker.settle([Outcome(lease, "bury", failure=failure)])
        await self.submit("unreadable", b'{"mark":"0000"}')
        await self._spoil(self.jobs["unreadable"], f'{{"a": "{self.canaries.one()}')
        return lease

    async def _spoil(self, job_id: str, payload: str) -> None:
        """Put a payload that is no JSON where the store has the job's."""
        url = served_url(self.stage).partition("+")[2].partition("?")[0]
        if url.startswith("sqlite"):
            with closing(sqlite3.connect(SqliteEngine(url).path)) as file, file:
                for table in ("inbox_jobs", "plane_jobs"):
                    change = f"UPDATE {table} SET payload = ? WHERE job_id = ?"
                    file.execute(change, (payload, job_id))
            return
        redis = Redis(url)
        try:
            for key in await redis.call("KEYS", f"*{job_id}*"):
                if await redis.call("TYPE", key) != "hash":
                    continue
                fields = await redis.call("HGETALL", key)
                for name, value in zip(fields[::2], fields[1::2], strict=True):
                    if b"0000" in value:
                        await redis.call("HSET", key, name, payload)
        finally:
            await redis.close()

    def paths(self) -> list[str]:
        """Every GET of the API document and every page, of every job."""
        described = json.loads(self.running.gateway.openapi)["paths"]
        paths = [path for path, methods in described.items() if "get" in methods]
        paths += [route.path for route in self.running.gateway.dashboard.routes() if route.methods
                  and "GET" in route.methods]  # fmt: skip
        found: list[str] = []
        for path in paths:
            if (path.endswith("/events") and path.startswith("/v1/")) or path in _NO_JOBS:
                continue
            if path.startswith(("/static", "/live", "/login", "/bulk", "/api/bulk")):
                continue
            template = path.replace(":path}", "}").replace("{queue}", quote(self.queue, safe=""))
            if path == "/transcode/status":
                template += "?job_id={job_id}"
            ids = self.jobs.values() if "{job_id}" in template else [""]
            found += [template.replace("{job_id}", quote(each, safe="")) for each in ids]
        return found

    async def signed_in(self, scope: str) -> Web:
        key = self.by[scope].headers["x-api-key"]
        form = {**FORM, "origin": self.running.url}
        reply = await Web(self.running.url).send("POST", "/login", f"key={key}".encode(), form)
        assert reply.status == 303
        return Web(self.running.url, {"cookie": reply.headers["set-cookie"].partition(";")[0]})

    def events_path(self, name: str) -> str:
        root = "/v1/plane/jobs" if self.contract == "plane" else "/v1/jobs"
        return f"{root}/{self.jobs[name]}/events"


@pytest.fixture(params=SERVED)
async def scene(request: pytest.FixtureRequest, servers: Servers) -> AsyncGenerator[Scene]:
    stage = await adapters(servers)[request.param].open(lease_ms=60_000)
    ring = MemoryKeyRing()
    settings = GatewaySettings(queues=(served_url(stage),), port=0)
    try:
        async with serving(settings, ring=ring) as running:
            made = Scene(stage, running, request.param)
            made.owner, text = await ring.create(["jobs:read", "observe"], "owner")
            keys = {"owner": text}
            for scope in ("observe", "admin"):
                keys[scope] = (await ring.create([scope, "jobs:read", "jobs:cancel"], scope))[1]
            made.by = {who: Web(running.url, {"x-api-key": key}) for who, key in keys.items()}
            yield made
    finally:
        await stage.close()


async def _events(stream: Following) -> str:
    return "\n".join(event.data for event in await stream.all())


async def test_no_reading_route_shows_a_secret_to_another_key(scene: Scene) -> None:
    await scene.fill()
    for scope in ("observe", "admin"):
        shown = 0
        for web in (scene.by[scope], await scene.signed_in(scope)):
            for path in scene.paths():
                reply = await web.get(path)
                scene.canaries.check(reply.body, f"{scope} {path}")
                shown += reply.status == 200 and any(each in path for each in scene.jobs.values())
        assert shown >= 2 * len(scene.jobs), "the routes of a job were not reached"


@pytest.mark.parametrize("scene", _HAS_OWNER, indirect=True)
async def test_the_requester_reads_its_jobs_whole(scene: Scene) -> None:
    await scene.fill()
    owner, path = scene.by["owner"], f"/api/queues/{quote(scene.queue, safe='')}/jobs"
    seen = ""
    for job_id in scene.jobs.values():
        for route in (f"{path}/{job_id}", f"{path}/{job_id}/events"):
            seen += json.dumps((await owner.get(route)).json)
    unseen = [each for each in scene.canaries if each not in seen]
    # Contracts keep either an event or a progress, or no stack: what is kept is shown.
    assert len(unseen) < len(scene.canaries) / 2, (len(unseen), len(scene.canaries))
    own = {"streams": "/v1/jobs/", "plane": "/v1/plane/jobs/", "inbox": "/transcode/status?job_id="}
    if scene.contract in own:
        route = own[scene.contract]
        seen = "".join([(await owner.get(route + each)).body.decode()
                        for each in (scene.jobs["done"], scene.jobs["failed"])])  # fmt: skip
        assert sum(each in seen for each in scene.canaries) > 10
        hidden = (await scene.by["observe"].get(route + scene.jobs["done"])).json
        assert "•••" in json.dumps(hidden, ensure_ascii=False)


@pytest.mark.parametrize("scene", _STREAMED, indirect=True)
async def test_event_streams_show_secrets_to_the_requester_alone(scene: Scene) -> None:
    lease = await scene.fill()
    live = {}
    for who in ("owner", "observe", "admin"):
        for name in ("done", "failed"):
            past = await _events(await scene.by[who].stream(scene.events_path(name)))
            if who == "owner":
                assert any(each in past for each in scene.canaries)
            else:
                scene.canaries.check(past, f"{who} {name}")
                assert "•••" in past
        live[who] = await scene.by[who].stream(scene.events_path("running"))
    told = {who: asyncio.create_task(_events(stream)) for who, stream in live.items()}
    before = len(scene.canaries)
    await scene.report(lease)
    await scene.worker.settle([Outcome(lease, "bury", failure=scene.canaries.failure())])
    seen = {who: await task for who, task in told.items()}
    assert any(each in seen["owner"] for each in scene.canaries[before:])
    for who in ("observe", "admin"):
        scene.canaries.check(seen[who], f"{who} live")


async def test_a_search_does_not_reveal_a_secret_by_matching(scene: Scene) -> None:
    await scene.fill()
    web = scene.by["admin"]
    assert (await web.get("/api/jobs/count?q=payload.n=1")).json["jobs"] == 4
    pages = await scene.signed_in("admin")
    for each in scene.canaries:
        for term in (each, f"payload=*{each}*", f"result=*{each}*", f"error:*{each}*"):
            found = (await web.get(f"/api/jobs/count?q={quote_plus(term)}")).json
            assert found == {"jobs": 0, "exact": True}, term
    one = scene.canaries[0]
    for term in (f"payload.password={one}", f"payload.password={one[:5]}*", one[:6]):
        listed = await web.get(f"/api/jobs?q={quote_plus(term)}")
        assert listed.json["jobs"] == [], term
        page = (await pages.get(f"/jobs?q={quote_plus(term)}")).body.decode()
        assert not any(job_path(scene.queue, each) in page for each in scene.jobs.values())


async def test_a_secret_in_a_search_is_not_kept_in_the_audit_log(scene: Scene) -> None:
    canary = scene.canaries.one()
    body = {"action": "cancel", "q": f"payload.password={canary}"}
    begun = await scene.by["admin"].post("/api/bulk", body)
    assert begun.status == 202
    for path in (f"/api/bulk/{begun.json['id']}", "/api/audit"):
        reply = await scene.by["observe"].get(path)
        assert reply.status == 200
        scene.canaries.check(reply.body, path)


@pytest.mark.parametrize("scene", ["inbox"], indirect=True)
async def test_the_outbox_shows_no_secret_of_an_address_or_answer(scene: Scene) -> None:
    one = scene.canaries.one
    hook = {"status_webhook_url": f"https://me:{one()}@hooks.example/jobs?token={one()}"}
    await scene.stage.queue().submit([NewJob(task="a", payload=b"{}", options=hook)])
    await scene.claim()
    outbox = open_queue(f"{served_url(scene.stage)}&box=outbox")
    try:
        (event,) = await outbox.claim(1, wait_ms=5_000)
        await outbox.settle([Outcome(event, "bury", failure=scene.canaries.failure())])
    finally:
        await outbox.close()
    pages = await scene.signed_in("observe")
    for web, path in ((scene.by["observe"], "/api/queues/inbox/outbox"), (pages, "/outbox")):
        reply = await web.get(path)
        assert event.job_id in reply.body.decode()
        scene.canaries.check(reply.body, path)


class Stalls:
    """The longest time for which the event loop served no one."""

    worst_s = 0.0

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun_s = loop.time()
            await asyncio.sleep(0.005)  # what is longer than this is the stall
            self.worst_s = max(self.worst_s, loop.time() - begun_s)


@pytest.mark.alone
@pytest.mark.parametrize("scene", _STREAMED, indirect=True)
async def test_looking_at_hostile_jobs_does_not_stall_the_gateway(scene: Scene) -> None:
    nested = "a://?x=" * 100 + "%" + "25" * 100 + "41" + "b" * 59_000
    hostile = json.dumps({"a": [nested, "a://?a=%41&" * 5_000, "--pw a:b@c/ " * 4_000]}).encode()
    for at in range(20):
        await scene.submit(str(at), hostile)
    observer = scene.by["observe"]
    pages = await scene.signed_in("observe")
    root = scene.events_path("0").removesuffix("/events")
    asked = [(observer, root), (observer, "/api/jobs?q=zzz"), (observer, "/api/jobs?q=payload.a=z")]
    asked += [(observer, "/api/jobs"), (pages, "/jobs?q=zzz")]
    if scene.contract == "streams":
        asked.append((observer, "/v1/jobs?limit=50"))
    for web, path in asked:
        stalls = Stalls()
        watching = asyncio.create_task(stalls.watch())
        reply = await web.get(path)
        watching.cancel()
        assert reply.status == 200, path
        assert stalls.worst_s < 0.25, path  # masked in the event loop: seconds


@pytest.mark.parametrize("scene", _STREAMED, indirect=True)
async def test_an_answer_to_a_cancel_by_an_admin_is_masked(scene: Scene) -> None:
    await scene.fill()
    for name in ("waiting", "running"):
        path = scene.events_path(name).removesuffix("/events") + "/cancel"
        reply = await scene.by["admin"].post(path)
        assert reply.status in (200, 202), reply.body
        scene.canaries.check(reply.body, path)
