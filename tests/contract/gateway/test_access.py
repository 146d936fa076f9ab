"""Keys, scopes, tickets, and who is let in without any."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from tenure.core.endpoint import Caller
from tenure.core.errors import UsageError
from tenure.gateway.keyrings import open_keyring
from tenure.gateway.keys import MemoryKeyRing
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.test_refusals import is_problem
from tests.contract.gateway.web import Web, read_reply
from tests.waiting import until

BODY = {"task": "chat", "payload": {}}
ALL = ("jobs:write", "jobs:read", "jobs:cancel")


class Keys:
    """The ring of a site, and clients that hold its keys."""

    def __init__(self, site: Site, url: str) -> None:
        self.ring = open_keyring(site.url())
        self._url = url

    async def client(self, *scopes: str, ttl_ms: int | None = None) -> Web:
        _, text = await self.ring.create(scopes or ALL, "test", ttl_ms)
        return Web(self._url, {"authorization": f"Bearer {text}"})


@pytest.fixture
async def keys(site: Site):  # type: ignore[no-untyped-def]
    gateway = await site.gateway()
    made = Keys(site, gateway.url)
    yield made
    await made.ring.close()


@pytest.mark.clause("S-51")
@pytest.mark.parametrize(
    ("scope", "allowed"),
    [
        ("jobs:write", {"submit"}),
        ("jobs:read", {"read", "list", "events", "ticket"}),
        ("metrics", {"metrics"}),
        ("jobs:cancel", {"cancel"}),
        (
            "admin",
            {"submit", "read", "list", "events", "cancel", "queues", "metrics", "ticket"}
            | {"pause", "resume"},
        ),
    ],
)
async def test_a_key_may_do_what_its_scopes_say_and_no_more(
    keys: Keys, scope: str, allowed: set[str]
) -> None:
    web = await keys.client(scope)
    missing = "8a8f5a4e-0000-4000-8000-000000000000"
    operations = {
        "submit": ("POST", "/v1/jobs", 415),
        "read": ("GET", f"/v1/jobs/{missing}", 404),
        "list": ("GET", "/v1/jobs", 200),
        "events": ("GET", f"/v1/jobs/{missing}/events", 404),
        "cancel": ("POST", f"/v1/jobs/{missing}/cancel", 404),
        "queues": ("GET", "/api/queues", 200),
        "metrics": ("GET", "/metrics", 200),
        "ticket": ("POST", "/v1/tickets", 201),
        "pause": ("POST", "/api/queues/streams/pause", 200),
        "resume": ("POST", "/api/queues/streams/resume", 200),
    }
    for name, (method, path, status) in operations.items():
        reply = await web.send(method, path)
        if name in allowed:
            assert reply.status == status, (name, reply)
        else:
            problem = is_problem(reply, 403, "scope")
            assert "scope" in problem["detail"]


@pytest.mark.clause("S-51")
async def test_the_key_is_taken_from_either_header_and_from_nowhere_else(keys: Keys) -> None:
    web = await keys.client()
    text = web.headers["authorization"].removeprefix("Bearer ")
    bare = Web(web.url)
    assert re.fullmatch(r"tn_[0-9a-f]{12}_[0-9a-f]{64}", text)
    assert (await bare.get("/v1/jobs", authorization=f"bearer {text}")).status == 200
    assert (await bare.get("/v1/jobs", x_api_key=text)).status == 200
    is_problem(await bare.get(f"/v1/jobs?api_key={text}"), 401, "no_key")
    is_problem(await bare.get(f"/v1/jobs?ticket={text}"), 401, "bad_key")


@pytest.mark.clause("S-51")
async def test_a_wrong_key_is_refused_with_a_challenge(keys: Keys) -> None:
    web = await keys.client()
    text = web.headers["authorization"].removeprefix("Bearer ")
    wrong = text[:-1] + ("0" if text[-1] != "0" else "1")
    for value in (wrong, "tn_000000000000_" + "0" * 64, "tn_x_y", "nonsense", text + "0"):
        reply = await Web(web.url).get("/v1/jobs", x_api_key=value)
        is_problem(reply, 401, "bad_key")
        assert reply.headers["www-authenticate"].startswith("Bearer")
    is_problem(await Web(web.url).get("/v1/jobs", authorization="Basic eA=="), 401, "bad_key")


@pytest.mark.clause("S-51")
async def test_a_stored_key_cannot_be_read_back(site: Site, keys: Keys) -> None:
    key, text = await keys.ring.create(("admin",), "laptop")
    stored = await site.redis.call("HGETALL", f"{site.ns}tenure:keys")
    assert text.rpartition("_")[2].encode() not in b"".join(stored)
    assert text.rpartition("_")[2] not in repr(await keys.ring.list())
    assert key.id in text


@pytest.mark.clause("S-51")
async def test_a_revoked_key_is_out_within_two_seconds(keys: Keys) -> None:
    """The key is in use all the time, so the gateway believes in it; its streams end as well."""
    web = await keys.client()
    job_id = await web.submit()
    following = await web.follow(job_id)
    [key] = await keys.ring.list()
    assert await keys.ring.revoke(key.id)
    begun = time.monotonic()

    async def refused() -> bool:
        return (await web.get("/v1/jobs")).status == 401

    await until(refused, within_s=2)
    async with asyncio.timeout(2 - (time.monotonic() - begun)):
        async for _event in following:
            pass
    assert not await keys.ring.revoke(key.id)


@pytest.mark.clause("S-51")
async def test_a_key_ends_by_itself(keys: Keys) -> None:
    web = await keys.client(ttl_ms=300)
    assert (await web.get("/v1/jobs")).status == 200

    async def refused() -> bool:
        return (await web.get("/v1/jobs")).status == 401

    await until(refused, within_s=3)


async def test_the_last_use_of_a_key_is_noted(keys: Keys) -> None:
    web = await keys.client()
    assert (await keys.ring.list())[0].last_used_ms == 0
    await web.get("/v1/jobs")
    assert (await keys.ring.list())[0].last_used_ms > 0


async def test_another_requesters_job_does_not_exist(keys: Keys) -> None:
    mine, theirs, admin = await keys.client(), await keys.client(), await keys.client("admin")
    job_id = await mine.submit()
    assert (await mine.get(f"/v1/jobs/{job_id}")).status == 200
    assert (await admin.get(f"/v1/jobs/{job_id}")).status == 200
    for reply in (
        await theirs.get(f"/v1/jobs/{job_id}"),
        await theirs.get(f"/v1/jobs/{job_id}/events"),
        await theirs.post(f"/v1/jobs/{job_id}/cancel"),
    ):
        missing = await theirs.get("/v1/jobs/8a8f5a4e-0000-4000-8000-000000000000")
        assert is_problem(reply, 404, "not_found")["detail"] == missing.json["detail"]
    assert (await theirs.get("/v1/jobs")).json["jobs"] == []
    assert len((await mine.get("/v1/jobs")).json["jobs"]) == 1
    assert len((await admin.get("/v1/jobs")).json["jobs"]) == 1


@pytest.mark.clause("S-24")
async def test_the_same_idempotency_key_of_two_requesters_makes_two_jobs(keys: Keys) -> None:
    one, two = await keys.client(), await keys.client()
    first = await one.post("/v1/jobs", BODY, idempotency_key="k")
    second = await two.post("/v1/jobs", {"task": "plan", "payload": {}}, idempotency_key="k")
    assert (first.status, second.status) == (202, 202)
    assert first.json["job_id"] != second.json["job_id"]


@pytest.mark.clause("S-51")
async def test_a_ticket_opens_one_stream_once(keys: Keys) -> None:
    web = await keys.client()
    job_id = await web.submit()
    await web.post(f"/v1/jobs/{job_id}/cancel")
    reply = await web.post("/v1/tickets")
    assert (reply.status, reply.json["expires_in_s"]) == (201, 60)
    ticket = reply.json["ticket"]
    bare = Web(web.url)
    following = await bare.follow(job_id, f"?ticket={ticket}")
    assert (await following.all())[-1].name == "canceled"
    is_problem(await bare.get(f"/v1/jobs/{job_id}/events?ticket={ticket}"), 401, "bad_key")


async def test_a_ticket_is_no_better_than_the_key_that_asked_for_it(keys: Keys) -> None:
    web = await keys.client("jobs:read")
    ticket = (await web.post("/v1/tickets")).json["ticket"]
    reply = await Web(web.url).send("POST", f"/v1/jobs?ticket={ticket}")
    is_problem(reply, 403, "scope")
    ticket = (await web.post("/v1/tickets")).json["ticket"]
    [key] = await keys.ring.list()
    await keys.ring.revoke(key.id)

    async def refused() -> bool:
        return (await web.get("/v1/jobs")).status == 401

    await until(refused, within_s=3)
    is_problem(await Web(web.url).get(f"/v1/jobs?ticket={ticket}"), 401, "bad_key")


async def test_a_ticket_runs_out() -> None:
    now = [1_000]
    ring = MemoryKeyRing(clock_ms=lambda: now[0])
    _, _ = await ring.create(ALL, "x")
    ticket = await ring.issue(Caller("k"))
    now[0] += 60_001
    assert await ring.redeem(ticket) is None


async def test_a_damaged_ticket_and_a_key_under_the_id_of_another_are_refused(
    site: Site, keys: Keys
) -> None:
    """Another program can write both into Redis."""
    web = await site.web(anonymous=False)
    redis = site.redis
    ticket = await keys.ring.issue(Caller("k"))
    (name,) = await redis.call("KEYS", f"{site.ns}*:ticket:*")
    await redis.call("SET", name, '{"req')
    is_problem(await web.get(f"/v1/jobs?ticket={ticket}"), 401, "bad_key")
    one, _ = await keys.ring.create(["jobs:read"], "one")
    other, text = await keys.ring.create(["jobs:read"], "other")
    (name,) = await redis.call("KEYS", f"{site.ns}*:keys")
    raw = await redis.call("HGET", name, other.id)
    await redis.call("HSET", name, other.id, raw.replace(other.id.encode(), one.id.encode()))
    is_problem(await web.get("/v1/jobs", authorization=f"Bearer {text}"), 401, "bad_key")


@pytest.mark.clause("S-51")
async def test_without_keys_a_local_caller_may_do_everything(site: Site, web: Web) -> None:
    job_id = await web.submit()
    assert (await web.post(f"/v1/jobs/{job_id}/cancel")).status == 200
    assert (await web.post("/api/queues/streams/pause")).status == 200


@pytest.mark.clause("S-51")
async def test_as_soon_as_there_is_a_key_keys_are_asked_for(site: Site, keys: Keys) -> None:
    bare = Web((await keys.client()).url)

    async def refused() -> bool:
        return (await bare.get("/v1/jobs")).status == 401

    await until(refused, within_s=3)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"x-forwarded-for": "203.0.113.7"}, 401),
        ({"forwarded": "for=203.0.113.7"}, 401),
        ({"via": "1.1 proxy"}, 401),
        ({"x-real-ip": "203.0.113.7"}, 401),
        ({"x-forwarded-host": "jobs.example"}, 401),
        ({"X-Forwarded-Proto": "https"}, 401),
        ({"x-forwarded-anything": ""}, 401),
        ({"cf-connecting-ip": "203.0.113.7"}, 401),
        ({"host": "127.0.0.1\r\nHost: 127.0.0.1"}, 403),
        ({"host": "[::1].evil.example"}, 403),
        ({"host": "localhost:80@evil.example"}, 403),
        ({"host": "127.0.0.1:80:evil.example"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"host": "localhost:8470"}, 200),
        ({"host": "[::1]:8470"}, 200),
    ],
)
async def test_a_page_of_another_site_or_a_proxy_is_not_a_local_caller(
    web: Web, headers: dict[str, str], status: int
) -> None:
    assert (await web.send("GET", "/v1/jobs", headers=headers)).status == status
    steering = await web.send("POST", "/api/queues/streams/resume", headers=headers)
    assert steering.status == status


async def test_a_proxy_that_says_nothing_but_http_1_0_is_not_a_local_caller(web: Web) -> None:
    """So nginx speaks to what is behind it, unless its configuration says otherwise."""
    reader, writer = await web.connect()
    writer.write(web.head("GET", "/v1/jobs").replace(b"HTTP/1.1", b"HTTP/1.0"))
    is_problem(await read_reply(reader), 401, "no_key")
    writer.close()


async def test_a_dashboard_behind_a_proxy_asks_for_a_key(web: Web) -> None:
    home = await web.get("/", via="1.1 proxy")
    assert (home.status, home.headers["location"]) == (303, "/login?next=%2F")


async def test_anonymous_callers_can_be_shut_out_on_loopback_too(site: Site) -> None:
    web = await site.web(anonymous=False)
    is_problem(await web.get("/v1/jobs"), 401, "no_key")
    home = await web.get("/")
    assert (home.status, home.headers["location"]) == (303, "/login?next=%2F")
    assert (await web.get("/livez")).status == 200


@pytest.mark.clause("S-51")
async def test_a_gateway_without_keys_refuses_to_face_the_network(site: Site) -> None:
    settings = GatewaySettings(queues=(site.url(),), host="0.0.0.0", port=0)
    with pytest.raises(UsageError, match="tenure keys create"):
        async with serving(settings):
            raise AssertionError("it must not start")
    ring = open_keyring(site.url())
    _, text = await ring.create(ALL, "test")
    async with serving(settings) as running:
        web = Web(running.url.replace("0.0.0.0", "127.0.0.1"))
        is_problem(await web.get("/v1/jobs"), 401, "no_key")
        assert (await web.get("/v1/jobs", x_api_key=text)).status == 200
    await ring.close()


async def test_a_key_that_asks_too_often_is_told_when_to_come_back(site: Site) -> None:
    gateway = await site.gateway(rate_per_s=0.5, rate_burst=3)
    keys = Keys(site, gateway.url)
    one, two = await keys.client(), await keys.client()
    assert [(await one.get("/v1/jobs")).status for _ in range(3)] == [200, 200, 200]
    reply = await one.get("/v1/jobs")
    assert is_problem(reply, 429, "rate_limited")["retry_after"] == 2
    assert (await two.get("/v1/jobs")).status == 200
    await keys.ring.close()


async def test_a_key_has_only_so_many_streams_open(site: Site) -> None:
    gateway = await site.gateway(streams_per_key=2)
    keys = Keys(site, gateway.url)
    web = await keys.client()
    job_id = await web.submit()
    first, _second = await web.follow(job_id), await web.follow(job_id)
    path = f"/v1/jobs/{job_id}/events"
    is_problem(await web.get(path), 429, "too_many_streams")
    first.close()

    async def room() -> bool:
        return (await web.send("HEAD", path)).status == 200

    await until(room)
    await keys.ring.close()


async def test_scopes_that_do_not_exist_are_refused_by_name(keys: Keys) -> None:
    with pytest.raises(UsageError, match=r"jobs:raed.*the scopes are jobs:write, jobs:read"):
        await keys.ring.create(("jobs:raed",), "x")
    with pytest.raises(UsageError, match="needs a scope"):
        await keys.ring.create((), "x")
