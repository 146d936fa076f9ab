"""What cannot be served is refused with a reason: never a fault of the plane's."""

import json
import re
import sqlite3
from typing import Any

import pytest

from tests.contract.gateway.web import JSON, Web
from tests.contract.plane.conftest import Site, claim, enqueue, proof

pytestmark = pytest.mark.clause("P-22")

BAD: list[tuple[str, Any]] = [
    ("claim", {}),
    ("claim", {"worker_id": ""}),
    ("claim", {"worker_id": "w1", "streams": ["nowhere"]}),
    ("claim", {"worker_id": "w1", "streams": "jobs"}),
    ("claim", {"worker_id": "w1", "max_wait_ms": -1}),
    ("claim", {"worker_id": "w1", "max_jobs": 10_000}),
    ("claim", {"worker_id": "w1", "max_job": 1}),
    ("heartbeat", {"worker_id": "w1"}),
    ("heartbeat", {"worker_id": "w1", "job_id": "a"}),
    ("complete", {"worker_id": "w1", "job_id": "a", "lease_token": "t", "result": 1}),
    ("fail", {"worker_id": "w1", "job_id": "a", "attempt_id": "a:1", "lease_token": "t"}),
    ("report", {"worker_id": "w1"}),
    ("upkeep", {}),
]
HELD = {"job_id": "a", "attempt_id": "a:1", "lease_token": "t", "stream": "jobs"}


@pytest.mark.parametrize(("name", "body"), BAD, ids=lambda value: str(value)[:50])
async def test_a_wrong_request_is_a_422_that_says_why(site: Site, name: str, body: Any) -> None:
    web = await site.web()
    reply = await web.post(f"/internal/worker/{name}", body)
    assert reply.status == 422, reply
    assert reply.headers["content-type"] == "application/problem+json"
    assert len(reply.json["detail"]) > 10


async def test_attempts_and_streams_that_do_not_fit_are_refused(site: Site) -> None:
    web = await site.web()
    for changed in (
        {"attempt_id": "b:1"},
        {"attempt_id": "a:x"},
        {"attempt_id": "a:" + "9" * 40},
        {"stream": "nowhere"},
        {"stream": {"name": "nowhere"}},
    ):
        body = {"worker_id": "w1", "result": 1} | HELD | changed
        reply = await web.post("/internal/worker/complete", body)
        assert reply.status == 422, (changed, reply)
    unknown = await web.post("/internal/worker/complete", {"worker_id": "w1", "result": 1} | HELD)
    assert (unknown.status, unknown.json["ok"], unknown.json["ack"]) == (200, False, True)


async def test_large_deep_and_broken_bodies_are_refused(site: Site) -> None:
    web = await site.web()
    lease_of = await enqueue(web)
    lease = await claim(web)
    assert lease["job_id"] == lease_of
    head = {"content-type": "application/json"}
    path = "/internal/worker/complete"
    start = json.dumps({"worker_id": "w1"} | proof(lease))[:-1].encode() + b',"result":'
    for result, status in (
        (b'"' + b"x" * (2 << 20) + b'"', 413),
        (b"[" * 5_000 + b"]" * 5_000, 400),
        (b'"\\u0000"', 422),
        (b'"\xff\xfe"', 400),
        (b"{", 400),
    ):
        reply = await web.send("POST", path, start + result + b"}", head)
        assert reply.status == status, (result[:20], reply.status, reply.body[:200])
    for payload in (b'"\xff"', b"[" * 5_000 + b"]" * 5_000):
        body = b'{"payload":' + payload + b"}"
        reply = await web.send("POST", "/v1/plane/jobs", body, head)
        assert reply.status in (400, 422), reply
    large = b'"' + b"x" * 1_000_000 + b'"'
    reply = await web.send("POST", path, start + large + b"}", head)
    assert (reply.status, reply.json["ok"]) == (200, True)


async def test_jobs_that_cannot_be_are_refused_one_by_one(site: Site) -> None:
    web = await site.web()
    jobs = [
        {"payload": 1},
        {"payload": 1, "delay_ms": -1},
        {"payload": 1, "priority": 2**40},
        {"payload": 1, "job_id": "a b"},
        {"payload": 1, "stream": "nowhere"},
        {"payload": 2, "max_attempts": 0},
        {"payload": 3},
    ]
    reply = await web.post("/v1/plane/jobs", {"jobs": jobs})
    said = [each["status"] for each in reply.json["results"]]
    assert said == ["created", *["invalid"] * 5, "created"]
    for wrong in ({}, {"payload": 1, "delay_ms": -1}, {"payload": 1, "prio": 1}):
        assert (await web.post("/v1/plane/jobs", wrong)).status == 422
    assert (await web.get("/v1/plane/jobs/nobody")).status == 404
    assert (await web.get("/v1/plane/jobs/a%20b")).status == 404
    assert (await web.send("DELETE", "/v1/plane/jobs")).status == 405


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 5_000], ids=["far", "below", "long"])
async def test_a_number_that_cannot_be_kept_is_refused_and_nothing_is_stored(
    site: Site, number: str
) -> None:
    web = await site.web()
    body = f'{{"payload": {{"n": [{number}]}}}}'.encode()
    for each in (
        body,
        b'{"jobs": [%b]}' % body,
        b'{"payload": 1, "priority": %b}' % number.encode(),
    ):
        reply = await web.send("POST", "/v1/plane/jobs", each, JSON)
        assert reply.status == 400, reply
        assert reply.json["code"] in ("bad_number", "bad_json")
    assert sum((await site.ledger().counts()).states.values()) == 0
    job_id = await enqueue(web)
    lease = await claim(web)
    named = json.dumps({"worker_id": "w1", **proof(lease)}).encode()
    result = b'%b, "result": {"n": %b}}' % (named[:-1], number.encode())
    reply = await web.send("POST", "/internal/worker/complete", result, JSON)
    assert reply.status == 400, reply
    assert (await web.get(f"/v1/plane/jobs/{job_id}")).json["status"] == "RUNNING"


async def test_a_large_number_that_can_be_kept_is_shown_as_it_was_sent(site: Site) -> None:
    web = await site.web()
    number = 10**250
    job_id = await enqueue(web, payload={"n": number})
    assert (await web.get(f"/v1/plane/jobs/{job_id}")).json["payload"] == {"n": number}
    assert (await claim(web))["payload"] == {"n": number}


async def test_a_row_that_cannot_be_read_is_set_aside_logged_and_counted(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    web = await site.web()
    bad, good = await enqueue(web), await enqueue(web)
    with sqlite3.connect(site.store.removeprefix("sqlite:///")) as file:
        file.execute("UPDATE plane_jobs SET payload = '{' WHERE job_id = ?", (bad,))
    assert (await claim(web))["job_id"] == good
    page = (await web.get("/metrics")).body.decode()
    assert re.search(r'tenure_quarantined_total\{queue="[^"]*"\} 1\.0', page)
    assert bad in caplog.text


async def test_a_body_limit_that_was_lowered_is_for_the_plane_too(site: Site) -> None:
    web = Web((await site.gateway(body_bytes_max=1_000)).url)
    job = {"task": "t", "payload": {"text": "x" * 1_000}}
    refused = await web.post("/v1/plane/jobs", job)
    assert (refused.status, refused.json["limit_bytes"]) == (413, 1_000)
    large = {"task": "t", "payload": {"text": "x" * 300_000}}
    assert (await (await site.web()).post("/v1/plane/jobs", large)).status < 300
