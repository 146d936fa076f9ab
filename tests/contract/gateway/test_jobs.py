"""Submitting, reading, listing and cancelling jobs over HTTP."""

from __future__ import annotations

import json
import re

import pytest

from tests.contract.gateway.conftest import Site
from tests.contract.gateway.web import JSON, Web

UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
TASKS = ["chat", "plan", "code", "tool", "rag", "embed"]


@pytest.mark.clause("S-40", "S-41")
@pytest.mark.parametrize("task", TASKS)
async def test_a_posted_job_is_stored_queued_and_announced(site: Site, web: Web, task: str) -> None:
    reply = await web.post("/v1/jobs", {"task": task, "payload": {"a": [1, "é"]}, "ttl_s": 77})
    job = reply.json
    assert reply.status == 202
    assert UUID.fullmatch(job["job_id"])
    assert reply.headers["location"] == f"/v1/jobs/{job['job_id']}"
    assert job["status"] == "queued"
    assert job["payload"] == {"a": [1, "é"]}
    stored = await site.redis.call("HMGET", f"{site.ns}job:{job['job_id']}", "status", "ttl_s")
    assert stored == [b"queued", b"77"]
    assert 0 < await site.redis.call("TTL", f"{site.ns}job:{job['job_id']}") <= 77
    [entry] = await site.redis.call("XRANGE", f"{site.ns}jobs:stream", "-", "+")
    fields = dict(zip(entry[1][::2], entry[1][1::2], strict=True))
    assert fields.keys() == {b"job_id", b"task", b"payload"}
    assert json.loads(fields[b"payload"]) == {"a": [1, "é"]}
    [event] = await site.ledger.events(job["job_id"])
    assert (event.type, event.step, event.data) == ("queued", "gateway.enqueue", b"{}")


async def test_without_ttl_s_the_gateways_own_applies(site: Site) -> None:
    web = await site.web(ttl_s=123)
    assert (await web.get(f"/v1/jobs/{await web.submit()}")).json["ttl_s"] == 123


async def test_a_delay_and_a_number_of_attempts_reach_the_store(site: Site, web: Web) -> None:
    job_id = await web.submit(delay_ms=60_000, max_attempts=7)
    job = (await web.get(f"/v1/jobs/{job_id}")).json
    assert job["max_attempts"] == 7
    assert job["due_ts"] >= job["created_ts"] + 60_000
    assert await site.worker.claim(1, wait_ms=1) == []


async def test_the_trace_context_travels_with_the_job(site: Site, web: Web) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    await web.post("/v1/jobs", {"task": "chat", "payload": {}}, traceparent=trace)
    assert (await site.claim()).trace == trace
    await web.post("/v1/jobs", {"task": "chat", "payload": {}}, traceparent="nonsense")
    assert (await site.claim()).trace == ""


@pytest.mark.clause("S-43", "S-3")
async def test_a_read_job_has_its_json_fields_decoded(site: Site, web: Web) -> None:
    job_id = await web.submit(payload={"deep": {"x": None}})
    await site.finish(await site.claim(), b'{"answer":[1,2.5]}')
    job = (await web.get(f"/v1/jobs/{job_id}")).json
    assert job["status"] == "done"
    assert job["payload"] == {"deep": {"x": None}}
    assert job["result"] == {"answer": [1, 2.5]}
    assert job["error"] is None
    assert job["job_id"] == job_id
    assert all(type(job[name]) is int for name in ("created_ts", "updated_ts", "ttl_s"))


async def test_a_hash_of_another_gateway_is_shown_even_if_its_json_is_broken(
    site: Site, web: Web
) -> None:
    fields = ("task", "chat", "status", "queued", "payload", "{oops", "created_ts", "x")
    await site.redis.call("HSET", f"{site.ns}job:foreign-1", *fields)
    job = (await web.get("/v1/jobs/foreign-1")).json
    assert job["payload"] == {"_raw": "{oops"}
    assert (job["result"], job["created_ts"]) == (None, 0)


@pytest.mark.clause("S-43", "S-44")
@pytest.mark.parametrize("path", ["", "/events"])
@pytest.mark.parametrize(
    "job_id",
    ["8a8f5a4e-0000-4000-8000-000000000000", "x:events", "a%2Fb", "*", "%C3%A9", "a" * 200],
)
async def test_an_unknown_or_impossible_id_is_not_found(web: Web, job_id: str, path: str) -> None:
    reply = await web.send("GET", f"/v1/jobs/{job_id}{path}")
    assert reply.status == 404
    assert reply.json["code"] == "not_found"


async def test_an_event_stream_is_never_mistaken_for_a_job(web: Web) -> None:
    job_id = await web.submit()
    assert (await web.get(f"/v1/jobs/{job_id}:events")).status == 404


@pytest.mark.clause("S-50")
async def test_cancelling_a_queued_job_ends_it_at_once(site: Site, web: Web) -> None:
    job_id = await web.submit()
    reply = await web.post(f"/v1/jobs/{job_id}/cancel")
    assert (reply.status, reply.json["status"]) == (200, "canceled")
    assert await site.worker.claim(1, wait_ms=1) == []


@pytest.mark.clause("S-50")
async def test_cancelling_a_running_job_goes_through_its_worker(site: Site, web: Web) -> None:
    job_id = await web.submit()
    lease = await site.claim()
    reply = await web.post(f"/v1/jobs/{job_id}/cancel")
    assert (reply.status, reply.json["status"]) == (202, "running")
    assert reply.json["cancel_requested"] is True
    [kept] = await site.worker.extend([lease])
    assert kept.cancel_requested


@pytest.mark.clause("S-50")
async def test_cancelling_a_finished_job_is_a_conflict(site: Site, web: Web) -> None:
    job_id = await web.submit()
    await site.finish(await site.claim())
    reply = await web.post(f"/v1/jobs/{job_id}/cancel")
    assert (reply.status, reply.json["code"]) == (409, "conflict")
    assert "done" in reply.json["detail"]
    assert (await web.post("/v1/jobs/none/cancel")).status == 404


async def test_a_list_goes_through_all_jobs_once_newest_first(web: Web) -> None:
    made = [await web.submit(task="plan" if n % 3 == 0 else "chat") for n in range(10)]
    seen: list[str] = []
    after = ""
    while True:
        page = (await web.get(f"/v1/jobs?limit=3&after={after}")).json
        seen += [job["job_id"] for job in page["jobs"]]
        after = page["after"]
        if not after:
            break
    assert sorted(seen) == sorted(made)
    assert len(seen) == len(made)
    assert seen[0] == made[-1] or seen[0] in made[-3:]
    plans = (await web.get("/v1/jobs?task=plan")).json["jobs"]
    assert sorted(job["job_id"] for job in plans) == sorted(made[::3])


async def test_a_list_can_be_narrowed_by_status(site: Site, web: Web) -> None:
    first, second = await web.submit(), await web.submit()
    lease = await site.claim()
    await site.finish(lease)
    done = (await web.get("/v1/jobs?status=done")).json["jobs"]
    assert [job["job_id"] for job in done] == [lease.job_id]
    waiting = (await web.get("/v1/jobs?status=queued")).json["jobs"]
    assert [job["job_id"] for job in waiting] == [({first, second} - {lease.job_id}).pop()]


async def test_a_head_request_answers_like_get_without_a_body(web: Web) -> None:
    job_id = await web.submit()
    for path in (f"/v1/jobs/{job_id}", f"/v1/jobs/{job_id}/events", "/", "/livez"):
        reply = await web.send("HEAD", path)
        assert (reply.status, reply.body) == (200, b"")


async def test_whitespace_and_duplicate_keys_in_a_body_are_fine(web: Web) -> None:
    body = b' {"task" : "code","task":"chat", "payload": {"a":1,\n "a":2}} '
    reply = await web.send("POST", "/v1/jobs", body, {"content-type": "Application/JSON; x=y"})
    assert reply.status == 202
    assert (reply.json["task"], reply.json["payload"]) == ("chat", {"a": 2})
    assert JSON["content-type"] == reply.headers["content-type"]
