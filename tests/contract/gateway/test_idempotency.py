"""The same request twice is one job."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.gateway.conftest import Site
from tests.contract.gateway.test_refusals import is_problem
from tests.contract.gateway.web import JSON, Web

BODY = {"task": "chat", "payload": {"a": 1}}


@pytest.mark.clause("S-42", "S-24")
async def test_the_same_key_and_body_answer_the_same_job(site: Site, web: Web) -> None:
    first = await web.post("/v1/jobs", BODY, idempotency_key="order-17")
    second = await web.post("/v1/jobs", BODY, idempotency_key="order-17")
    assert (first.status, second.status) == (202, 202)
    assert first.json["job_id"] == second.json["job_id"]
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert second.headers["location"] == first.headers["location"]
    assert await site.redis.call("XLEN", f"{site.ns}jobs:stream") == 1
    assert await site.redis.call("TTL", f"{site.ns}idempotency:order-17") > 0


@pytest.mark.clause("S-42")
async def test_the_same_body_in_other_spacing_is_the_same_request(web: Web) -> None:
    headers = {**JSON, "idempotency-key": "k"}
    tight = await web.send("POST", "/v1/jobs", b'{"task":"chat","payload":{"a":1}}', headers)
    loose = await web.send("POST", "/v1/jobs", b'{ "payload": {"a" : 1}, "task":"chat"}', headers)
    assert tight.json["job_id"] == loose.json["job_id"]


@pytest.mark.clause("S-42")
@pytest.mark.parametrize(
    "other",
    [
        {"task": "chat", "payload": {"a": 2}},
        {"task": "plan", "payload": {"a": 1}},
        {"task": "chat", "payload": {"a": 1}, "ttl_s": 60},
    ],
)
async def test_the_same_key_with_another_body_is_a_conflict(
    site: Site, web: Web, other: object
) -> None:
    await web.post("/v1/jobs", BODY, idempotency_key="k")
    is_problem(await web.post("/v1/jobs", other, idempotency_key="k"), 409, "conflict")
    assert await site.redis.call("XLEN", f"{site.ns}jobs:stream") == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb", "\x80"])
async def test_a_key_that_no_store_should_hold_is_refused(web: Web, key: str) -> None:
    reply = await web.post("/v1/jobs", BODY, idempotency_key=key)
    is_problem(reply, 400, "bad_idempotency_key")


@pytest.mark.clause("S-42")
async def test_a_storm_of_equal_requests_makes_one_job_each(site: Site, web: Web) -> None:
    """20 keys, 20 requests at once with each: 20 jobs, every answer names the right one."""
    other = await site.web()

    async def ask(key: int, turn: int) -> tuple[int, str, bool]:
        client = (web, other)[turn % 2]
        body = {"task": "chat", "payload": {"n": key}}
        reply = await client.post("/v1/jobs", body, idempotency_key=f"storm-{key}")
        assert reply.status == 202, reply
        return key, reply.json["job_id"], "idempotency-replayed" in reply.headers

    asked = [ask(key, turn) for turn in range(20) for key in range(20)]
    answers = await asyncio.gather(*asked)
    jobs = {key: {job for asked, job, _ in answers if asked == key} for key in range(20)}
    assert all(len(ids) == 1 for ids in jobs.values())
    assert len({min(ids) for ids in jobs.values()}) == 20
    assert sum(not replayed for _, _, replayed in answers) == 20
    assert await site.redis.call("XLEN", f"{site.ns}jobs:stream") == 20
