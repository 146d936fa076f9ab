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
from tenure.core.redaction import MASK
from tenure.core.seam import PAGE_BYTES, Query, Queue, weight
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tests.contract.adapters import Servers, adapters, served_url
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.test_observing import SERVED
from tests.contract.gateway.web import Web
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
        assert not waits or statistics.median(waits) < 0.1, waits
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


async def test_a_key_has_a_bounded_number_of_searches_at_once(site: Site) -> None:
    web = await site.web()
    await submitted(site.worker, {"rows": ["a=b " * 15_000] * 4}, 40)
    writers = await began(web, _DEEP, _CLIENTS)
    reply = await web.get(_DEEP)
    assert (reply.status, reply.json["code"]) == (429, "too_many_searches"), reply
    assert reply.headers["retry-after"] == "1"
    assert (await web.get("/jobs")).status == 429
    for writer in writers:
        writer.close()

    async def is_served() -> bool:
        return (await web.get("/jobs")).status == 200

    await until(is_served, "those that left make room")


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
