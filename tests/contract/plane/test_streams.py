"""Streams in their order, waiting workers, and keys that are good for some streams alone."""

import asyncio
from typing import Any

import pytest

from tenure.core.errors import StoreError
from tenure.core.job import NewJob
from tenure.gateway.keys import new_key
from tests.contract.gateway.web import Web
from tests.contract.plane.conftest import Site, claim, enqueue, proof, verb
from tests.waiting import until


@pytest.mark.clause("P-9")
async def test_the_first_stream_of_a_request_goes_first(site: Site) -> None:
    web = await site.web(streams="high,low")
    low, high = await enqueue(web, stream="low"), await enqueue(web, stream="high")
    assert (await claim(web, streams=["high", "low"]))["job_id"] == high
    assert (await claim(web, streams=["high", "low"]))["job_id"] == low
    high, low = await enqueue(web, stream="high"), await enqueue(web, stream="low")
    assert (await claim(web, streams=["low", "high"]))["job_id"] == low
    assert (await claim(web, streams=["low", "high"]))["stream"]["name"] == "high"


@pytest.mark.clause("P-9")
async def test_the_first_stream_goes_first_however_many_claims_there_are(site: Site) -> None:
    web = await site.web(streams="high,low")
    jobs = [{"payload": 1, "stream": "high"}] * 30 + [{"payload": 1, "stream": "low"}] * 3
    await web.post("/v1/plane/jobs", {"jobs": jobs})
    order = [(await claim(web))["stream"]["name"] for _ in range(33)]
    assert order == ["high"] * 30 + ["low"] * 3


@pytest.mark.clause("P-9")
async def test_with_fairness_a_stream_that_is_always_full_does_not_starve_another(
    site: Site,
) -> None:
    web = await site.web(streams="high,low", fair_every=8)
    jobs = [{"payload": 1, "stream": "high"}] * 60 + [{"payload": 1, "stream": "low"}] * 3
    await web.post("/v1/plane/jobs", {"jobs": jobs})
    order = [(await claim(web))["stream"]["name"] for _ in range(24)]
    assert order.count("low") == 3
    assert order[:7] == ["high"] * 7


@pytest.mark.clause("P-10")
async def test_a_waiting_claim_is_answered_when_a_job_comes(site: Site) -> None:
    web = await site.web()
    waiting = asyncio.create_task(claim(web, max_wait_ms=20_000))
    await asyncio.sleep(0)
    began = asyncio.get_running_loop().time()
    job_id = await enqueue(web)
    assert (await waiting)["job_id"] == job_id
    assert asyncio.get_running_loop().time() - began < 5


@pytest.mark.clause("P-10", "P-18")
async def test_a_job_that_came_by_another_plane_wakes_a_waiting_worker(site: Site) -> None:
    here, there = await site.web(), await site.web()
    waiting = asyncio.create_task(claim(here, max_wait_ms=20_000))
    await asyncio.sleep(0)
    job_id = await enqueue(there)
    assert (await asyncio.wait_for(waiting, 5))["job_id"] == job_id


@pytest.mark.clause("P-10")
async def test_many_who_wait_get_one_job_each(site: Site) -> None:
    web = await site.web()
    waiting = [
        asyncio.create_task(claim(web, worker_id=f"w{n}", max_wait_ms=20_000)) for n in range(40)
    ]
    await asyncio.sleep(0)
    await web.post("/v1/plane/jobs", {"jobs": [{"payload": n} for n in range(40)]})
    leases = await asyncio.wait_for(asyncio.gather(*waiting), 20)
    assert sorted(lease["payload"] for lease in leases) == list(range(40))


@pytest.mark.clause("P-10")
async def test_a_worker_that_hung_up_is_given_nothing(site: Site) -> None:
    """Its job goes to somebody else at once, and has not lost an attempt."""
    web = await site.web(lease_ms=60_000)
    for _ in range(5):
        reader, writer = await web.connect()
        body = b'{"worker_id":"gone","max_wait_ms":20000}'
        writer.write(
            web.head("POST", "/internal/worker/claim", body, {"content-type": "application/json"})
            + body
        )
        await writer.drain()
        await asyncio.sleep(0.02)  # whether the plane has begun to wait does not matter
        writer.transport.abort()
        job_id = await enqueue(web)
        lease = await claim(web)
        assert (lease["job_id"], lease["attempt"]) == (job_id, 1)
        assert (await verb(web, "complete", **proof(lease), result=1))["ok"]
        del reader


@pytest.mark.clause("P-25")
async def test_a_plane_that_shuts_down_answers_those_who_wait(site: Site) -> None:
    running = await site.gateway()
    web = Web(running.url)
    waiting = asyncio.create_task(verb(web, "claim", max_wait_ms=30_000))
    await until(lambda: len(running.gateway.queues[0].queue.plane._waiters) == 1)  # type: ignore[attr-defined]
    running.gateway.drain()
    assert await asyncio.wait_for(waiting, 5) == {"claimed": False}


@pytest.mark.clause("P-20")
async def test_the_key_that_a_gateway_was_started_with_is_good_for_workers_alone(
    site: Site,
) -> None:
    _, text = new_key(("jobs:work",), "workers", None, 0)
    await site.ring.create(("jobs:write",), "somebody")
    running = await site.gateway(worker_key=text)
    queue = site.worker(running.url.replace("http://", f"http://worker:{text}@"))
    assert await queue.claim(1, wait_ms=0) == []
    with pytest.raises(StoreError, match="403"):
        await queue.submit([NewJob(task="t", payload=b"{}")])
    with pytest.raises(StoreError, match="401"):
        await site.worker(running.url).claim(1, wait_ms=0)


@pytest.mark.clause("P-20")
async def test_a_key_is_good_for_its_scope_and_its_streams(site: Site) -> None:
    web = await site.web(streams="mail,video")
    await enqueue(web, stream="mail")
    await enqueue(web, stream="video")
    keys: dict[str, str] = {}
    for name, scopes in (
        ("producer", ["jobs:write"]),
        ("mailer", ["jobs:work", "stream:mail"]),
        ("worker", ["jobs:work"]),
    ):
        keys[name] = (await site.ring.create(scopes, name))[1]

    async def ask(key: str, name: str = "claim", **fields: Any) -> Any:
        body = {"worker_id": "w1"} | fields
        return await web.post(f"/internal/worker/{name}", body, X_Api_Key=key)

    await asyncio.sleep(1.1)  # what the door believes about keys is a second old at most
    assert (await web.post("/internal/worker/claim", {"worker_id": "w1"})).status == 401
    assert (await ask(keys["producer"])).status == 403
    refused = await ask(keys["mailer"], streams=["video"])
    assert (refused.status, "mail" in refused.json["detail"]) == (403, True)
    mail = (await ask(keys["mailer"])).json
    assert mail["stream"]["name"] == "mail"
    assert (await ask(keys["mailer"])).json == {"claimed": False}
    video = (await ask(keys["worker"])).json
    assert video["stream"]["name"] == "video"
    assert (await ask(keys["mailer"], "complete", **proof(video), result=1)).status == 403
    assert (await ask(keys["mailer"], "complete", **proof(mail), result=1)).json["ok"]


@pytest.mark.clause("P-20")
async def test_a_worker_for_one_stream_does_the_upkeep_of_that_stream_alone(site: Site) -> None:
    web = await site.web(streams="mail,video")
    for stream in ("mail", "video"):
        await enqueue(web, stream=stream, delay_ms=1)
    mailer = (await site.ring.create(["jobs:work", "stream:mail"], "mailer"))[1]
    worker = (await site.ring.create(["jobs:work"], "worker"))[1]
    for key in (mailer, worker):  # what is due has become so before the second look
        reply = await web.post("/internal/worker/upkeep", {"worker_id": "w1"}, X_Api_Key=key)
        assert (reply.status, reply.json["promoted"]) == (200, 1)


@pytest.mark.clause("P-20")
async def test_a_worker_for_one_stream_cannot_tell_whether_a_job_of_another_exists(
    site: Site,
) -> None:
    web = await site.web(streams="mail,video")
    await enqueue(web, stream="video")
    mailer = (await site.ring.create(["jobs:work", "stream:mail"], "mailer"))[1]
    worker = (await site.ring.create(["jobs:work"], "worker"))[1]
    await asyncio.sleep(1.1)  # what the door believes about keys is a second old at most
    video = (await web.post("/internal/worker/claim", {"worker_id": "w"}, X_Api_Key=worker)).json

    async def answers(job_id: str) -> list[Any]:
        held: dict[str, Any] = {
            "job_id": job_id,
            "attempt_id": f"{job_id}:1",
            "lease_token": "guessed",
            "stream": "mail",
        }
        error = {"code": "x", "message": "", "retryable": False}
        asked: list[tuple[str, dict[str, Any]]] = [
            ("complete", held | {"result": 1}),
            ("fail", held | {"error": error}),
            ("heartbeat", held),
            ("report", {"reports": [held | {"type": "progress", "data": 1}]}),
        ]
        replies = [
            await web.post(f"/internal/worker/{name}", {"worker_id": "w"} | body, X_Api_Key=mailer)
            for name, body in asked
        ]
        return [(reply.status, reply.json) for reply in replies]

    foreign, missing = await answers(video["job_id"]), await answers("missing")
    assert str(foreign).replace(video["job_id"], "missing") == str(missing)
