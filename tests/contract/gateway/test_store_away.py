"""The store goes away and comes back; the gateway stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from tenure.core.errors import ServerError
from tenure.gateway.keyrings import open_keyring
from tenure.store.embedded import EmbeddedRedis
from tests.chaos.proxy import LossyProxy
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.test_refusals import is_problem
from tests.contract.gateway.web import Web
from tests.contract.stages import runs_a_script
from tests.waiting import until

BODY = {"task": "chat", "payload": {"a": 1}}


@pytest.fixture
async def own_server() -> AsyncGenerator[EmbeddedRedis]:
    """A server that a test may stop; its data outlive it."""
    server = EmbeddedRedis(appendfsync="always")
    await asyncio.to_thread(server.start)
    yield server
    await asyncio.to_thread(server.stop)


@pytest.fixture
async def proxy(redis_server: EmbeddedRedis) -> AsyncGenerator[LossyProxy]:
    async with LossyProxy(redis_server.url) as proxy:
        yield proxy


@pytest.fixture
async def distant(proxy: LossyProxy) -> AsyncGenerator[Site]:
    """A site whose Redis is behind the proxy."""
    async with AsyncExitStack() as stack:
        made = Site(proxy.url, stack)
        stack.push_async_callback(made.close)
        yield made


@pytest.mark.clause("S-49")
async def test_without_its_store_the_gateway_says_try_later_and_recovers_by_itself(
    proxy: LossyProxy, distant: Site
) -> None:
    web = await distant.web()
    job_id = await web.submit()
    await proxy.stop()
    for reply in (
        await web.post("/v1/jobs", BODY),
        await web.get(f"/v1/jobs/{job_id}"),
        await web.get(f"/v1/jobs/{job_id}/events"),
        await web.post(f"/v1/jobs/{job_id}/cancel"),
        await web.get("/api/queues"),
    ):
        problem = is_problem(reply, 503, "store_away")
        assert problem["retry_after"] == int(reply.headers["retry-after"]) >= 1
        assert "127.0.0.1" not in reply.body.decode(), "where the store is, is nobody's business"
    assert (await web.get("/livez")).status == 200
    assert (await web.get("/readyz")).status == 503
    verbose = await web.get("/readyz?verbose")
    assert "[-] store:streams unreachable" in verbose.body.decode()
    metrics = (await web.get("/metrics")).status
    assert metrics in (200, 503)
    page = await web.get("/")
    assert page.status == 503
    assert "The store does not answer" in page.body.decode()
    assert "127.0.0.1" not in page.body.decode()
    await proxy.start()

    async def back() -> bool:
        return (await web.get("/readyz")).status == 200

    await until(back)
    assert (await web.get(f"/v1/jobs/{job_id}")).json["status"] == "queued"
    assert (await web.post("/v1/jobs", BODY)).status == 202


@pytest.mark.clause("S-49", "S-26")
@pytest.mark.parametrize("keyed", [False, True])
async def test_a_lost_answer_is_asked_for_again_and_makes_one_job(
    proxy: LossyProxy, distant: Site, keyed: bool
) -> None:
    """The script runs, its answer is lost: the client gets its 202 and there is one job."""
    web = await distant.web()
    await web.submit()
    headers = {"idempotency_key": "k"} if keyed else {}
    proxy.drop_reply(when=runs_a_script)
    reply = await web.post("/v1/jobs", BODY, **headers)
    assert proxy.replies_lost >= 1
    assert reply.status == 202
    assert "idempotency-replayed" not in reply.headers, "it is this request's own job"
    jobs = (await web.get("/v1/jobs")).json["jobs"]
    assert len(jobs) == 2
    assert reply.json["job_id"] in [job["job_id"] for job in jobs]


@pytest.mark.parametrize("path", ["/v1/jobs/{}/cancel", "/api/queues/streams/cancel"])
async def test_a_change_whose_answer_was_lost_is_in_the_audit_log(
    proxy: LossyProxy, distant: Site, path: str
) -> None:
    ring = open_keyring(distant.url())
    admin, admin_text = await ring.create(("admin",), "admin")
    tenant, tenant_text = await ring.create(("jobs:write", "jobs:read", "jobs:cancel"), "tenant")
    await ring.close()
    url = (await distant.web()).url
    web = Web(url, {"authorization": f"Bearer {admin_text}"})
    its = Web(url, {"authorization": f"Bearer {tenant_text}"})
    await its.post(f"/v1/jobs/{await its.submit()}/cancel")  # the server knows the script now
    job_id = await its.submit()
    proxy.drop_reply(when=runs_a_script)
    body = {"job_ids": [job_id]} if path.startswith("/api") else None
    assert (await web.post(path.format(job_id), body)).status == 503
    assert (await web.get(f"/v1/jobs/{job_id}")).json["status"] == "canceled"
    (entry,) = (await web.get("/api/audit")).json["entries"]
    assert (entry["action"], entry["ids"], entry["whose"]) == ("cancel", [job_id], [tenant.id])
    assert entry["who"] == admin.id
    assert entry["outcome"].startswith("unknown")


async def test_a_job_that_cannot_be_read_back_was_accepted_all_the_same(
    proxy: LossyProxy, distant: Site
) -> None:
    web = await distant.web()
    await web.post("/v1/jobs", BODY, idempotency_key="again")
    proxy.drop_reply(when=lambda command: command[0].upper() == b"HGETALL")
    reply = await web.post("/v1/jobs", BODY, idempotency_key="again")
    assert (reply.status, reply.json["status"]) == (202, "queued")
    stored = await web.get(f"/v1/jobs/{reply.json['job_id']}")
    assert stored.json["payload"] == reply.json["payload"]


async def test_followers_keep_their_place_while_the_store_is_away(
    proxy: LossyProxy, distant: Site, redis_server: EmbeddedRedis
) -> None:
    web = await distant.web(sweep_ms=100)
    job_id = await web.submit()
    following = await web.follow(job_id)
    reading = asyncio.create_task(following.all(30))
    lease = await distant.claim()
    await distant.tell(lease, "before")
    await proxy.stop()
    async with AsyncExitStack() as stack:
        near = Site(redis_server.url, stack)
        stack.push_async_callback(near.close)
        key = f"{distant.ns}job:{job_id}:events"
        fields = ("type", "progress", "ts", 1, "step", "while away", "data", "{}")
        await near.redis.call("XADD", key, "*", *fields)
    assert (await web.get("/readyz")).status == 503
    await proxy.start()

    async def finished() -> bool:
        try:
            await distant.finish(lease)
        except Exception:
            return False
        return True

    await until(finished)
    names = [event.name for event in await reading]
    assert names == ["hello", "queued", "running", "progress", "progress", "done"]


async def test_a_store_that_was_restarted_still_has_the_jobs(own_server: EmbeddedRedis) -> None:
    async with AsyncExitStack() as stack:
        site = Site(own_server.url, stack)
        stack.push_async_callback(site.close)
        web = Web((await site.gateway()).url)
        jobs = [await web.submit() for _ in range(10)]
        await asyncio.to_thread(own_server.kill)
        is_problem(await web.post("/v1/jobs", BODY), 503, "store_away")
        await asyncio.to_thread(own_server.start)

        async def back() -> bool:
            return (await web.get("/readyz")).status == 200

        await until(back)
        for job_id in jobs:
            assert (await web.get(f"/v1/jobs/{job_id}")).json["status"] == "queued"


async def test_a_key_of_the_wrong_type_is_set_aside_and_the_submit_is_taken(
    own_server: EmbeddedRedis,
) -> None:
    async with AsyncExitStack() as stack:
        site = Site(own_server.url, stack)
        stack.push_async_callback(site.close)
        web = Web((await site.gateway()).url)
        stream = f"{site.ns}jobs:stream"
        await site.redis.call("SET", stream, "not a stream")
        with pytest.raises(ServerError, match=f"{stream} is a string"):
            await site.redis.call("XADD", stream, "*", "a", "b")
        reply = await web.post("/v1/jobs", BODY)
        assert reply.status == 202
        kept = await site.redis.call("GET", f"{site.ns}jobs:quarantine:jobs:stream")
        assert kept == b"not a stream"
        assert (await site.claim()).job_id == reply.json["job_id"]


async def test_a_store_that_refuses_to_write_is_no_store_that_is_away(
    own_server: EmbeddedRedis,
) -> None:
    async with AsyncExitStack() as stack:
        site = Site(own_server.url, stack)
        stack.push_async_callback(site.close)
        web = Web((await site.gateway()).url)
        job_id = await web.submit()
        await site.redis.call("CONFIG", "SET", "maxmemory", 1)
        reply = await web.post("/v1/jobs", BODY)
        problem = is_problem(reply, 503, "store_refused")
        assert problem["retry_after"] == int(reply.headers["retry-after"]) >= 1
        assert "reached" not in reply.body.decode()
        assert (await web.get(f"/v1/jobs/{job_id}")).json["status"] == "queued", "it can be read"
        await site.redis.call("CONFIG", "SET", "maxmemory", 0)
        assert (await web.post("/v1/jobs", BODY)).status == 202
        assert len((await web.get("/v1/jobs")).json["jobs"]) == 2, "the refused one is not stored"


async def test_a_store_that_answers_but_refuses_writes_is_not_ready(
    own_server: EmbeddedRedis,
) -> None:
    async with AsyncExitStack() as stack:
        site = Site(own_server.url, stack)
        stack.push_async_callback(site.close)
        web = Web((await site.gateway()).url)

        async def status() -> int:
            return (await web.get("/readyz")).status

        assert await status() == 200
        await site.redis.call("CONFIG", "SET", "min-replicas-to-write", "1")
        await until(lambda: is_status(status, 503))
        assert (await web.get("/readyz")).json["checks"]["store:streams"] == "refuses writes"
        is_problem(await web.post("/v1/jobs", BODY), 503, "store_refused")
        await site.redis.call("CONFIG", "SET", "min-replicas-to-write", "0")
        await until(lambda: is_status(status, 200))


async def is_status(ask: Callable[[], Awaitable[int]], wanted: int) -> bool:
    return await ask() == wanted
