"""The client of a plane over HTTP keeps what every client keeps, as far as there are routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tenure import Client, Conflict, JobFailed, NotFound
from tenure.core.errors import StoreError, UsageError
from tests.contract.adapters import Servers, adapters
from tests.contract.gateway.web import JSON, Web
from tests.contract.plane.conftest import Site
from tests.contract.stages import StoredStage
from tests.contract.suite import test_client as suite
from tests.contract.suite import test_schedules as schedules
from tests.contract.suite.serving import serving

SOON_S = 20.0
HELD = [
    suite.test_a_typed_result_comes_back_as_its_type,
    suite.test_models_of_all_makes_go_in_and_out,
    suite.test_a_task_that_lives_elsewhere_goes_by_its_name,
    suite.test_a_payload_that_does_not_fit_fails_the_job_once_and_names_the_field,
    suite.test_an_option_that_no_contract_has_is_refused,
    suite.test_a_key_gives_the_same_job_and_another_request_under_it_is_a_conflict,
    suite.test_one_bad_job_of_many_harms_no_other,
    suite.test_a_result_that_cannot_be_stored_fails_the_job_once,
    suite.test_a_result_of_another_type_than_declared_is_said_to_be,
    suite.test_a_job_that_takes_too_long_for_its_caller_goes_on,
    suite.test_the_events_of_a_job_end_with_its_end,
    suite.test_a_waiting_job_is_cancelled_at_once,
    suite.test_a_running_job_is_cancelled_through_its_worker,
    suite.test_states_are_portable_and_jobs_are_found_by_them,
    suite.test_a_paused_queue_hands_out_nothing_until_it_is_resumed,
    suite.test_any_number_of_handles_waits_on_one_connection,
    schedules.test_a_schedule_is_stored_listed_and_removed,
    schedules.test_the_same_schedule_again_changes_nothing_and_another_one_replaces_it,
    schedules.test_a_schedule_refuses_what_it_cannot_mean,
    schedules.test_the_jobs_of_a_declared_schedule_run_once_each_at_their_times,
    schedules.test_a_schedule_that_is_declared_no_more_is_removed,
]


@asynccontextmanager
async def over_http(servers: Servers, name: str, **options: int) -> AsyncGenerator[StoredStage]:
    """A plane whose clients speak HTTP, as its workers do."""
    stage: Any = await adapters(servers)[name].open(lease_ms=10_000, **options)
    stage.served_url = stage.url
    try:
        yield stage
    finally:
        await stage.close()


@pytest.mark.parametrize("name", ["plane", "plane_postgres"])
@pytest.mark.parametrize("held", HELD, ids=lambda test: test.__name__.removeprefix("test_"))
async def test_a_client_over_http_keeps_what_every_client_keeps(
    held: Callable[[Any], Coroutine[Any, Any, None]], name: str, servers: Servers
) -> None:
    async with over_http(servers, name) as stage:
        await held(stage)


@pytest.mark.alone
@pytest.mark.parametrize("name", ["plane", "plane_postgres"])
async def test_a_result_arrives_within_ten_milliseconds(name: str, servers: Servers) -> None:
    async with over_http(servers, name) as stage:
        await suite.test_a_result_arrives_within_ten_milliseconds(stage)


async def test_a_full_plane_says_when_to_try_again(servers: Servers) -> None:
    async with over_http(servers, "plane", depth_max=2) as stage:
        await suite.test_a_full_queue_says_when_to_try_again(stage)


async def test_a_failure_carries_the_traceback_of_the_worker(servers: Servers) -> None:
    async with over_http(servers, "plane") as stage, Client(stage.url) as client:
        async with serving(stage, suite.broken):
            handle = await client.submit(suite.broken.call(reason="on fire"), attempts=1)
            with pytest.raises(JobFailed, match="on fire") as failed:
                await handle.result(timeout_s=SOON_S)
        assert "raise ValueError(reason)" in failed.value.traceback
        assert (await handle.status()).state == "failed"


async def test_a_failed_job_is_found_whole_and_sent_back(servers: Servers) -> None:
    async with over_http(servers, "plane") as stage, Client(stage.url) as client:
        async with serving(stage, suite.broken, suite.greet):
            failed = await client.submit(suite.broken.call(reason="on fire"), attempts=1)
            await failed.wait(timeout_s=SOON_S)
            done = await client.submit(suite.greet, name="Ada")
            await done.wait(timeout_s=SOON_S)
        (found,) = (await client.find(state="failed", task=suite.broken)).jobs
        assert (found.id, found.payload) == (failed.id, {"reason": "on fire"})
        assert found.error is not None
        assert found.error.message == "on fire"
        pages = [await client.find(limit=1)]
        pages.append(await client.find(limit=1, after=pages[0].after))
        assert [job.id for page in pages for job in page.jobs] == [done.id, failed.id]
        await failed.retry()
        assert (await failed.status()).state == "waiting"
        with pytest.raises(Conflict):
            await failed.retry()
        with pytest.raises(NotFound):
            await client.handle("no-such-job").retry()


async def test_what_is_an_operators_needs_the_scope_of_one(site: Site) -> None:
    gateway = await site.gateway(site.url(), anonymous=False)
    producer, observer = [
        (await site.ring.create(scopes, "k"))[1]
        for scopes in (("jobs:write", "jobs:read"), ("jobs:write", "jobs:read", "observe"))
    ]
    address = gateway.url.removeprefix("http://")
    async with Client(f"plane+http://:{producer}@{address}") as client:
        handle = await client.submit("greet", {"name": "Ada"})
        for call in (client.find, client.counts, client.pause, client.resume, handle.retry):
            with pytest.raises(StoreError, match="scope"):
                await call()
    async with Client(f"plane+http://:{observer}@{address}") as client:
        assert [job.id for job in (await client.find()).jobs] == [handle.id]
        assert (await client.counts()).waiting == 1
        with pytest.raises(StoreError, match="admin"):
            await client.pause()


async def test_what_has_no_route_is_refused_with_the_address_that_has_it(servers: Servers) -> None:
    async with over_http(servers, "plane") as stage, Client(stage.url) as client:
        with pytest.raises(UsageError, match=r"at its database, plane\+sqlite://"):
            await client.chain(("greet", {"name": "Ada"}), ("greet", {"name": "Bob"}))
        missing = client.handle("no-such-job")
        for ask in (missing.result, missing.status, missing.cancel):
            with pytest.raises(NotFound):
                await ask()


async def test_a_requester_cannot_take_the_id_of_a_scheduled_or_chained_job(site: Site) -> None:
    gateway = await site.gateway(site.url(), anonymous=False)
    web = Web(gateway.url, {"x-api-key": (await site.ring.create(("jobs:write",), "k"))[1]})
    for job_id in ("report@1794794400000", "import-17@0.1"):
        body = json.dumps({"payload": 1, "job_id": job_id}).encode()
        answer = await web.send("POST", "/v1/plane/jobs", body, JSON)
        assert (answer.status, "schedules and chains" in answer.json["detail"]) == (422, True)
    jobs = [{"payload": 1, "job_id": job_id} for job_id in ("import-17@0.1", "me@home-2")]
    answer = await web.send("POST", "/v1/plane/jobs", json.dumps({"jobs": jobs}).encode(), JSON)
    assert [each["status"] for each in answer.json["results"]] == ["invalid", "created"]


async def test_a_key_for_a_stream_reaches_the_schedules_of_that_stream(site: Site) -> None:
    gateway = await site.gateway(site.url(streams="now,later"), anonymous=False)
    scopes = ("jobs:work", "stream:now"), ("jobs:work", "stream:later"), ("jobs:write",)
    keys = [(await site.ring.create(each, "k"))[1] for each in scopes]
    now, later, producer = [Web(gateway.url, {"x-api-key": key}) for key in keys]
    path, hourly = "/v1/plane/schedules/hourly", {"task": "t", "payload": 1, "every_ms": 3_600_000}
    assert (await producer.send("PUT", path, json.dumps(hourly).encode(), JSON)).status == 403
    assert (await later.send("PUT", path, json.dumps(hourly).encode(), JSON)).status == 403
    assert (await now.send("PUT", path, json.dumps(hourly).encode(), JSON)).status == 200
    moved = json.dumps(hourly | {"stream": "later"}).encode()
    assert (await later.send("PUT", path, moved, JSON)).status == 403, "it is one of another stream"
    assert (await later.send("DELETE", path)).status == 403
    seen = [(await each.get("/v1/plane/schedules")).json["schedules"] for each in (now, later)]
    assert [[each["name"] for each in found] for found in seen] == [["hourly"], []]
    assert (await now.send("DELETE", path)).json == {"removed": True}
    assert (await now.send("DELETE", path)).json == {"removed": False}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"every_ms": 0}, "either cron"),
        ({"cron": "* * *", "every_ms": 0}, "cron pattern"),
        ({"stream": "nowhere"}, "streams"),
        ({"every": 7}, "every"),
    ],
)
async def test_a_schedule_that_cannot_work_is_refused(
    site: Site, wrong: dict[str, Any], says: str
) -> None:
    gateway = await site.gateway()
    body = {"task": "t", "payload": {}, "every_ms": 3_600_000} | wrong
    path = "/v1/plane/schedules/hourly"
    said = await Web(gateway.url).send("PUT", path, json.dumps(body).encode(), JSON)
    assert said.status in (400, 422)
    assert says in said.body.decode()


async def test_a_client_hears_of_its_own_jobs_alone(site: Site) -> None:
    gateway = await site.gateway(anonymous=False)
    scopes = ["jobs:write", "jobs:read"]
    mine, yours = [(await site.ring.create(scopes, name))[1] for name in ("mine", "yours")]
    webs = [Web(gateway.url, {"x-api-key": key}) for key in (mine, yours)]
    begun = (await webs[0].get("/v1/plane/news")).json["after"]
    ids = []
    for web in webs:
        reply = await web.post("/v1/plane/jobs", {"task": "greet", "payload": {}})
        ids.append(reply.json["job_id"])
    for web, job_id in zip(webs, ids, strict=True):
        news = (await web.get(f"/v1/plane/news?after={begun}&wait_ms=5000")).json
        assert {each["job_id"] for each in news["moved"]} == {job_id}
        later = await web.get(f"/v1/plane/news?after={news['after']}&wait_ms=50")
        assert later.json["moved"] == []
    assert (await webs[0].get(f"/v1/plane/jobs/{ids[1]}/history")).status == 404
    history = (await webs[1].get(f"/v1/plane/jobs/{ids[1]}/history")).json
    assert ([each["type"] for each in history["events"]], history["complete"]) == (["QUEUED"], True)


async def test_one_who_waits_for_news_reads_for_all(site: Site) -> None:
    gateway = await site.gateway()
    web = Web(gateway.url)
    begun = (await web.get("/v1/plane/news")).json["after"]
    path = f"/v1/plane/news?after={begun}&wait_ms=20000"
    waiting = [asyncio.create_task(Web(gateway.url).get(path)) for _ in range(5)]
    short = await web.get(f"/v1/plane/news?after={begun}&wait_ms=50")
    assert short.json == {"after": begun, "moved": []}
    job_id = (await web.post("/v1/plane/jobs", {"task": "greet", "payload": {}})).json["job_id"]
    async with asyncio.timeout(SOON_S):
        answers = await asyncio.gather(*waiting)
    assert all(each.json["moved"][0]["job_id"] == job_id for each in answers)


async def test_news_of_a_plane_with_several_streams_come_at_once(site: Site) -> None:
    gateway = await site.gateway(site.url(streams="now,later"))
    async with Client(f"plane+{gateway.url}") as client:
        handle = await client.submit("greet", {"name": "Ada"}, extra={"stream": "later"})
        waiting = asyncio.create_task(handle.wait(timeout_s=SOON_S))
        await suite.until_awaited(client, 1)
        await handle.cancel()
        assert (await waiting).state == "cancelled"
