"""Everything the gateway refuses, and that it says why in one form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.contract.gateway.conftest import Site
from tests.contract.gateway.web import JSON, Reply, Web, read_reply

LIMIT = 200 * 1024


def is_problem(reply: Reply, status: int, code: str) -> dict[str, Any]:
    assert reply.status == status, reply
    assert reply.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = reply.json
    assert problem["status"] == status
    assert problem["code"] == code, problem
    assert problem["type"] == f"/docs#{code}"
    assert problem["title"]
    assert problem["detail"]
    assert problem["request_id"] == reply.headers["x-request-id"]
    return problem


async def post(web: Web, body: bytes, **headers: str) -> Reply:
    return await web.send("POST", "/v1/jobs", body, {**JSON, **headers})


@pytest.mark.clause("S-49")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"task":"chat","payload":{"a":NaN}}',
        b'{"task":"chat","payload":{"a":Infinity}}',
        b'{"task":"chat","payload":{"a":"\x00"}}',
        b'{"task":"chat","payload":{"a":"\xff"}}',
        b'{"task":"chat","payload":{"a":"\\ud800"}}',
        b'{"task":"chat","payload":{}} {}',
    ],
)
async def test_what_is_not_json_is_a_bad_request(web: Web, body: bytes) -> None:
    problem = is_problem(await post(web, body), 400, "bad_json")
    assert problem["instance"] == "/v1/jobs"


@pytest.mark.clause("S-49", "S-40")
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"task": "sing", "payload": {}}, "task"),
        ({"task": "chat"}, "payload"),
        ({"payload": {}}, "task"),
        ({"task": "chat", "payload": []}, "payload"),
        ({"task": "chat", "payload": "{}"}, "payload"),
        ({"task": "chat", "payload": None}, "payload"),
        ({"task": "chat", "payload": {}, "ttl_s": 0}, "ttl_s"),
        ({"task": "chat", "payload": {}, "ttl_s": -1}, "ttl_s"),
        ({"task": "chat", "payload": {}, "ttl_s": 10**9}, "ttl_s"),
        ({"task": "chat", "payload": {}, "ttl_s": "60"}, "ttl_s"),
        ({"task": "chat", "payload": {}, "ttl_s": True}, "ttl_s"),
        ({"task": "chat", "payload": {}, "max_attempts": 0}, "max_attempts"),
        ({"task": "chat", "payload": {}, "delay_ms": -5}, "delay_ms"),
        ({"task": "chat", "payload": {}, "prio": 1}, "prio"),
        ([], ""),
        ("chat", ""),
    ],
)
async def test_an_unacceptable_job_is_refused_and_the_field_named(
    site: Site, web: Web, body: Any, field: str
) -> None:
    reply = await post(web, json.dumps(body).encode())
    problem = is_problem(reply, 422, "invalid")
    assert problem["field"] == field
    assert await site.redis.call("EXISTS", f"{site.ns}jobs:stream") == 0


@pytest.mark.clause("S-49")
async def test_nul_characters_are_refused_wherever_they_stand(web: Web) -> None:
    for payload in (b'{"a":"x\\u0000y"}', b'{"x\\u0000":1}', b'{"a":[{"b":["\\u0000"]}]}'):
        reply = await post(web, b'{"task":"chat","payload":%b}' % payload)
        is_problem(reply, 422, "nul")
    harmless = await post(web, b'{"task":"chat","payload":{"a":"\\\\u0000"}}')
    assert harmless.status == 202


@pytest.mark.clause("S-49")
@pytest.mark.parametrize("levels", [129, 500, 30_000])
async def test_deep_nesting_is_refused(web: Web, levels: int) -> None:
    nested = b"[" * (levels - 2) + b"]" * (levels - 2)
    body = b'{"task":"chat","payload":{"a":%b}}' % nested
    is_problem(await post(web, body), 400, "too_deep")


async def test_nesting_up_to_the_limit_is_taken(web: Web) -> None:
    nested = b"[" * 30 + b"]" * 30
    assert (await post(web, b'{"task":"chat","payload":{"a":%b}}' % nested)).status == 202
    wide = b",".join([b"[]"] * 200)
    assert (await post(web, b'{"task":"chat","payload":{"a":[%b]}}' % wide)).status == 202


@pytest.mark.clause("S-49")
@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_of_another_kind_is_refused(web: Web, media: str) -> None:
    headers = {"content-type": media} if media else {}
    reply = await web.send("POST", "/v1/jobs", b'{"task":"chat","payload":{}}', headers)
    is_problem(reply, 415, "media_type")


@pytest.mark.clause("S-40", "S-49")
async def test_a_body_at_the_limit_is_taken_and_one_byte_more_is_not(web: Web) -> None:
    empty = len(b'{"task":"chat","payload":{"a":""}}')
    body = b'{"task":"chat","payload":{"a":"%b"}}' % (b"x" * (LIMIT - empty))
    assert len(body) == LIMIT
    assert (await post(web, body)).status == 202
    reply = await post(web, body + b" ")
    assert is_problem(reply, 413, "too_large")["limit_bytes"] == LIMIT
    assert reply.headers["connection"] == "close"


@pytest.mark.clause("S-49")
async def test_a_declared_length_over_the_limit_is_refused_before_the_body_is_sent(
    web: Web,
) -> None:
    reader, writer = await web.connect()
    writer.write(web.head("POST", "/v1/jobs", None, {**JSON, "content-length": "999999999"}))
    async with asyncio.timeout(5):
        is_problem(await read_reply(reader), 413, "too_large")
    writer.close()


@pytest.mark.clause("S-49")
async def test_a_chunked_upload_is_refused_while_it_is_being_read(web: Web) -> None:
    """The client never says how much will come, and never finishes."""
    reader, writer = await web.connect()
    writer.write(web.head("POST", "/v1/jobs", None, {**JSON, "transfer-encoding": "chunked"}))
    piece = b"x" * 16_384
    for _ in range(LIMIT // len(piece) + 1):
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    async with asyncio.timeout(5):
        is_problem(await read_reply(reader), 413, "too_large")
        assert await reader.read() == b"", "the connection is closed"
    writer.close()


async def test_a_client_that_writes_on_still_gets_its_refusal(web: Web) -> None:
    """Many clients read only when they have written everything: that must not break first."""
    body = b"x" * (6 << 20)
    reader, writer = await web.connect()
    async with asyncio.timeout(10):
        writer.write(web.head("POST", "/v1/jobs", body, JSON))
        for start in range(0, len(body), 65_536):
            writer.write(body[start : start + 65_536])
            await writer.drain()
        is_problem(await read_reply(reader), 413, "too_large")
    writer.close()


async def test_a_body_that_does_not_arrive_times_out(site: Site) -> None:
    web = await site.web(body_timeout_ms=100)
    reader, writer = await web.connect()
    writer.write(web.head("POST", "/v1/jobs", None, {**JSON, "content-length": "50"}) + b"{")
    async with asyncio.timeout(5):
        is_problem(await read_reply(reader), 408, "body_timeout")
    writer.close()


@pytest.mark.clause("S-49")
async def test_an_unknown_page_and_an_unknown_method_are_problems_too(web: Web) -> None:
    is_problem(await web.get("/v2/jobs"), 404, "not_found")
    is_problem(await web.get("/v1/jobs/"), 404, "not_found")
    reply = await web.send("DELETE", "/v1/jobs")
    is_problem(reply, 405, "method")
    assert reply.headers["allow"] == "GET, HEAD, POST"
    is_problem(await web.send("POST", "/docs"), 405, "method")
    is_problem(await web.send("OPTIONS", "/v1/jobs"), 405, "method")


@pytest.mark.parametrize(
    "query", ["status=dead", "task=sing", "limit=0", "limit=999", "limit=x", "after=zz", "pgae=2"]
)
async def test_a_bad_list_parameter_is_refused_by_name(web: Web, query: str) -> None:
    problem = is_problem(await web.get(f"/v1/jobs?{query}"), 422, "invalid")
    assert problem["field"] == query.partition("=")[0]


@pytest.mark.clause("S-25", "S-49")
async def test_a_full_queue_says_when_to_try_again(site: Site) -> None:
    web = await site.web(queues=(site.url(max_depth=2),))
    first = await web.submit()
    await web.submit()
    reply = await web.post("/v1/jobs", {"task": "chat", "payload": {}})
    problem = is_problem(reply, 429, "queue_full")
    assert problem["retry_after"] == int(reply.headers["retry-after"]) >= 1
    await web.post(f"/v1/jobs/{first}/cancel")
    assert (await web.post("/v1/jobs", {"task": "chat", "payload": {}})).status == 202


async def test_every_answer_carries_the_security_headers(web: Web) -> None:
    for path in ("/v1/jobs", "/nope", "/", "/docs", "/openapi.json", "/livez"):
        headers = (await web.get(path)).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        assert not [name for name in headers if name.startswith("access-control-")]
        assert "server" not in headers


async def test_a_request_id_is_kept_if_it_is_harmless_and_made_if_not(web: Web) -> None:
    assert (await web.get("/livez", x_request_id="abc-1")).headers["x-request-id"] == "abc-1"
    made = (await web.get("/livez", x_request_id="a b<script>")).headers["x-request-id"]
    assert made != "a b<script>"
    assert made


@pytest.mark.clause("S-49")
async def test_an_unknown_word_is_answered_with_the_words_there_are(web: Web) -> None:
    reply = await post(web, b'{"task": "nope", "payload": {}}')
    assert (reply.status, reply.json["field"]) == (422, "task")
    assert reply.json["detail"].endswith("it is one of chat, plan, code, tool, rag, embed")
    reply = await web.get("/v1/jobs?status=finished")
    assert "it is one of queued, running, done, error, canceled" in reply.json["detail"]
