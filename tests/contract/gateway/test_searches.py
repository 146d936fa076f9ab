"""Searches cost the gateway no more than their budget, and nothing once their client has left."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Any
from urllib.parse import quote

import pytest

from tenure.core.job import NewJob
from tenure.core.lease import Report
from tenure.core.outcome import Failure, Outcome
from tenure.core.redaction import MASK
from tenure.core.seam import PAGE_BYTES, Query, Queue, weight
from tenure.gateway.keyrings import open_keyring
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tests.contract.adapters import Servers, adapters, served_url
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.test_observing import SERVED
from tests.contract.gateway.web import Web, read_head
from tests.waiting import until

_CLIENTS = 8
_DEEP = "/api/jobs?limit=500&q=" + quote('"no such text"')


async def submitted(queue: Queue, payload: Any, count: int) -> list[str]:
    raw = json.dumps(payload).encode()
    made = []
    for _ in range(count):
        (answer,) = await queue.submit([NewJob(task="chat", payload=raw)])
        made.append(answer.job_id)
    return made


async def began(web: Web, path: str, count: int) -> list[asyncio.StreamWriter]:
    """Clients that ask and do not read; the gateway is at work for all of them."""
    writers = []
    for _ in range(count):
        _, writer = await web.connect()
        writer.write(web.head("GET", path))
        writers.append(writer)
    await until(lambda: at_work() == count)
    return writers


def at_work() -> int:
    """The requests that the gateway, which runs in this event loop, has not answered."""
    return sum("run_asgi" in repr(task.get_coro()) for task in asyncio.all_tasks())


async def is_idle() -> bool:
    begun = time.process_time()
    await asyncio.sleep(0.4)  # the span over which the use of the processor is measured
    return time.process_time() - begun < 0.1


async def livez_s(web: Web) -> float:
    begun = time.perf_counter()
    assert (await web.get("/livez")).status == 200
    return time.perf_counter() - begun


async def test_searches_end_when_their_clients_leave_and_hold_up_nobody(site: Site) -> None:
    web = await site.web()
    text = " ".join(f"word{n}=value{n}" for n in range(3_000))
    await submitted(site.worker, {"rows": [text] * 4}, 120)
    for span_s in (0.0, 1.5):  # clients that leave at once, and in the midst of the masking
        writers = await began(web, _DEEP, _CLIENTS)
        waits: list[float] = []
        end_s = time.monotonic() + span_s
        while time.monotonic() < end_s:
            waits.append(await livez_s(web))
            await asyncio.sleep(0.02)  # the pace of the probe
        # The masking thread gives way every 5 ms, and a request takes some twenty turns.
        assert not waits or statistics.median(waits) < 0.3, waits
        for writer in writers:
            writer.close()
        await until(lambda: not at_work(), "searches without clients end", within_s=2)
        await until(is_idle, "nothing is masked for clients that left", within_s=2)


@pytest.mark.parametrize("contract", SERVED)
async def test_a_search_beyond_its_budget_says_so_and_its_cursor_reaches_everything(
    servers: Servers, contract: str
) -> None:
    stage = await adapters(servers)[contract].open(lease_ms=60_000)
    try:
        async with serving(GatewaySettings(queues=(served_url(stage),), port=0)) as running:
            web = Web(running.url)
            made = await submitted(stage.queue(), {"blob": "x" * 900_000}, 40)
            found: list[str] = []
            answers: list[Any] = []
            while not answers or answers[-1]["after"]:
                after = answers[-1]["after"] if answers else ""
                reply = await web.get(f"/api/jobs?q=task:chat&limit=50&after={after}")
                answers.append(reply.json)
                found += [job["job_id"] for job in reply.json["jobs"]]
                assert len(answers) < 10
            assert not answers[0]["complete"]
            assert answers[-1]["complete"]
            assert sorted(found) == sorted(made)
            count = (await web.get("/api/jobs/count?q=task:chat")).json
            assert not count["exact"]
            assert count["jobs"] < len(made)
            page = await stage.ledger.find(Query(limit=200))
            assert page.after
            assert sum(map(weight, page.jobs)) < 2 * PAGE_BYTES
    finally:
        await stage.close()


async def test_a_key_has_a_bounded_number_of_searches_at_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await site.gateway()
    web, (queue,) = Web(gateway.url), gateway.gateway.queues

    found: list[int] = []

    found: list[int] = []

    async def find(*_: object, **__: object) -> None:
        found.append(1)
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(queue.ledger, "find", find)
        writers = await began(web, _DEEP, _CLIENTS)
        await until(lambda: len(found) == _CLIENTS, "each has its place")
        reply = await web.get(_DEEP)
        assert (reply.status, reply.json["code"]) == (429, "too_many_searches"), reply
        assert reply.headers["retry-after"] == "1"
        assert (await web.get("/jobs")).status == 429
        for path in ("/api/queues/x/jobs/y", "/api/queues/x/jobs/y/events"):
            assert (await web.get(path)).status == 429, path
        for writer in writers:
            writer.close()
        await until(lambda: not at_work(), "those that left make room")
    assert (await web.get("/jobs")).status == 200


async def test_lists_of_jobs_have_the_places_of_searches_and_end_with_their_clients(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await site.gateway()
    web, (queue,) = Web(gateway.url), gateway.gateway.queues
    found: list[int] = []
    cancelled: list[int] = []

    async def find(*_: object, **__: object) -> None:
        found.append(1)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    with monkeypatch.context() as patched:
        patched.setattr(queue.ledger, "find", find)
        writers = await began(web, "/v1/jobs", _CLIENTS)
        await until(lambda: len(found) == _CLIENTS, "each has its place")
        reply = await web.get("/v1/jobs")
        assert (reply.status, reply.json["code"]) == (429, "too_many_searches"), reply
        assert reply.headers["retry-after"] == "1"
        assert (await web.get("/readyz")).status == 200
        assert len(cancelled) == 0
        for writer in writers:
            writer.close()
        await until(lambda: len(cancelled) == _CLIENTS, "they end with their clients")
        await until(lambda: not at_work())
    assert (await web.get("/v1/jobs")).status == 200


async def test_a_large_payload_is_masked_whole_and_cannot_be_searched(site: Site) -> None:
    web = await site.web()
    (large,) = await submitted(site.worker, {"note": ["needle", *["x" * 60_000] * 5]}, 1)
    (small,) = await submitted(site.worker, {"note": ["needle", *["x" * 60_000] * 4]}, 1)
    queue = (await web.get("/api/jobs")).json["jobs"][0]["queue"]
    shown = {
        job_id: (await web.get(f"/api/queues/{queue}/jobs/{job_id}")).json["payload"]
        for job_id in (large, small)
    }
    found = (await web.get("/api/jobs?q=needle")).json["jobs"]
    assert [job["job_id"] for job in found] == [small]
    assert shown[small]["note"][0] == "needle"
    assert shown[large] == MASK


async def test_a_key_has_a_bounded_number_of_live_streams(site: Site) -> None:
    gateway = await site.gateway()
    ring = open_keyring(site.url())
    one, other = [
        Web(gateway.url, {"authorization": f"Bearer {(await ring.create(['observe'], name))[1]}"})
        for name in ("one", "other")
    ]
    await ring.close()
    opened = [await one.stream("/live") for _ in range(20)]
    refused = await one.get("/live")
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    opened.append(await other.stream("/live"))
    opened[0].abort()

    async def has_room() -> bool:
        reader, writer = await one.connect()
        writer.write(one.head("GET", "/live"))
        status, _ = await read_head(reader)
        writer.close()
        return status == 200

    await until(has_room, "the one that left makes room")
    for each in opened[1:]:
        each.abort()


async def test_pages_of_dead_letters_and_workers_are_bounded_and_say_so(site: Site) -> None:
    web = await site.web()
    await site.worker.submit([NewJob(task="chat", payload=b"{}") for _ in range(203)])
    for start in range(0, 203, 50):
        leases = await site.worker.claim(50, wait_ms=0)
        await site.worker.settle(
            [
                Outcome(lease, "bury", failure=Failure(code=f"E{start + at}", message="m"))
                for at, lease in enumerate(leases)
            ]
        )
    dead = (await web.get("/dead")).body.decode()
    assert dead.count("<tr id=") == 200
    assert "3 smaller groups are left out" in dead
    now_ms = time.time_ns() // 1_000_000
    beats = [part for n in range(510) for part in (f"w{n}", f"{now_ms} 1")]
    await site.redis.call("HSET", site.ledger._keys[8], *beats)
    shown = (await web.get("/workers")).body.decode()
    assert shown.count("<tr id=") == 500
    assert "more are left out" in shown


@pytest.mark.parametrize("contract", SERVED)
async def test_the_progress_of_jobs_counts_for_the_bytes_of_a_page(
    servers: Servers, contract: str
) -> None:
    stage = await adapters(servers)[contract].open(lease_ms=60_000)
    try:
        queue, progress = stage.queue("w1"), b'"%b"' % (b"x" * 60_000)
        made = await submitted(queue, {}, 90)
        for _ in made:
            (lease,) = await queue.claim(1, wait_ms=1_000)
            assert await queue.report([Report(lease=lease, progress=progress)]) == [None]
        page = await stage.ledger.find(Query(limit=200))
        assert page.after
        assert sum(len(job.progress) for job in page.jobs) < PAGE_BYTES + len(progress)
    finally:
        await stage.close()
