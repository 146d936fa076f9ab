"""Four gateway processes on one Redis and one PostgreSQL: clients may use any of them."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tenure.core.lease import Report
from tenure.core.outcome import Outcome
from tenure.core.registry import open_queue
from tenure.gateway.keyrings import open_keyring
from tenure.gateway.keys import Key, KeyRing
from tenure.gateway.limits import Quota
from tenure.plans.schedule import occurrence_id
from tests.contract.adapters import Servers
from tests.contract.cli.conftest import Program
from tests.contract.gateway.test_access import BODY
from tests.contract.gateway.test_sessions import OWN, is_in, sign_in
from tests.contract.gateway.web import SseEvent, Web
from tests.contract.inbox_stage import migrated
from tests.ports import free_port
from tests.waiting import until

pytestmark = pytest.mark.few
GATEWAYS = 4
EVERY_MS = 200


@dataclass(frozen=True)
class Fleet:
    """The gateways' addresses and their queues."""

    urls: list[str]
    streams: str
    plane: str
    ring: KeyRing | None = None

    async def key(self, *scopes: str, **quota: float) -> tuple[Key, list[Web]]:
        """A new key, and a client of each gateway that has it."""
        assert self.ring is not None
        key, text = await self.ring.create(scopes or ("jobs:write", "jobs:read"), "test")
        if quota:
            await self.ring.limit(key.id, Quota(**quota))  # type: ignore[arg-type]
        return key, [Web(url, {"authorization": f"Bearer {text}"}) for url in self.urls]


@pytest.fixture(scope="module")
def running(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Started once for the tests of this file: each has its own keys, jobs and streams."""
    schema = f"many_{os.getpid()}"
    postgres = servers.postgres()
    asyncio.run(migrated(postgres, schema))
    options = f"schema={schema}&streams=leases,ticks&lease_ms=1000&upkeep_ms=100"
    plane = f"plane+{postgres}{'&' if '?' in postgres else '?'}{options}"
    streams = f"streams+{servers.redis()}?namespace={{t{secrets.token_hex(4)}}}:"
    folder: Path = tmp_path_factory.mktemp("gateways")
    ports = [free_port() for _ in range(GATEWAYS)]
    environment = {"TENURE_GATEWAY_QUEUES": f"{streams}\n{plane}"}
    programs = [
        Program(["gateway", "--require-key", "--port", str(port)], folder, environment)
        for port in ports
    ]
    try:
        for program in programs:
            program.heard("gateway_ready")
        yield Fleet([f"http://127.0.0.1:{port}" for port in ports], streams, plane)
    finally:
        for program in programs:
            program.kill()


@pytest.fixture
async def fleet(running: Fleet) -> AsyncGenerator[Fleet]:
    ring = open_keyring(running.streams)
    yield Fleet(running.urls, running.streams, running.plane, ring)
    await ring.close()


async def statuses(webs: list[Web], path: str) -> set[int]:
    return {reply.status for reply in await asyncio.gather(*(web.get(path) for web in webs))}


async def test_every_gateway_is_ready_and_needs_no_key_to_say_so(fleet: Fleet) -> None:
    """As a kubelet asks: by the address of the pod, without a key."""
    for url in fleet.urls:
        reply = await Web(url).get("/readyz", host="10.1.2.3:8470")
        assert (reply.status, reply.json["status"]) == (200, "ready")
        assert (await Web(url).get("/livez", host="10.1.2.3:8470")).status == 200
        assert (await Web(url).get("/v1/jobs")).status == 401


async def test_a_new_key_opens_every_gateway_and_a_revoked_one_none(fleet: Fleet) -> None:
    key, webs = await fleet.key()
    assert await statuses(webs, "/v1/jobs") == {200}
    assert fleet.ring is not None
    assert await fleet.ring.revoke(key.id)

    async def is_out() -> bool:
        return await statuses(webs, "/v1/jobs") == {401}

    await until(is_out, "every gateway refuses the key")


async def test_an_idempotency_key_sent_to_all_at_once_makes_one_job(fleet: Fleet) -> None:
    _, webs = await fleet.key()
    header = {"idempotency_key": secrets.token_hex(8)}
    replies = await asyncio.gather(*(web.post("/v1/jobs", BODY, **header) for web in webs))
    assert {reply.status for reply in replies} <= {200, 202}
    assert len({reply.json["job_id"] for reply in replies}) == 1


async def test_the_unfinished_jobs_of_a_key_are_limited_by_all_together(fleet: Fleet) -> None:
    _, webs = await fleet.key(depth=3)
    assert [(await webs[0].post("/v1/jobs", BODY)).status for _ in range(3)] == [202] * 3
    for web in webs:

        async def is_full(web: Web = web) -> bool:
            return (await web.post("/v1/jobs", BODY)).status == 429

        await until(is_full, f"{web.url} hears of the jobs that others took")


async def test_followers_at_all_gateways_see_the_same_events_once(fleet: Fleet) -> None:
    _, webs = await fleet.key()
    job_id = await webs[0].submit()
    followers = [await web.follow(job_id) for web in webs]
    worker = open_queue(fleet.streams, worker_id="w1")
    try:
        lease = None
        while lease is None or lease.job_id != job_id:  # others of this file left jobs
            (lease,) = await worker.claim(1, wait_ms=10_000)
        for step in ("one", "two", "three"):
            assert await worker.report([Report(lease=lease, step=step, data=b"{}")]) == [None]
        await worker.settle([Outcome(lease, "complete", b"{}")])
    finally:
        await worker.close()
    seen = [stored(await each.all()) for each in followers]
    assert len(seen[0]) >= 5
    assert all(each == seen[0] for each in seen)
    # One goes on at the next gateway after every event, as a client of a balancer may.
    resumed, last = list[tuple[str, str]](), ""
    for number in range(len(seen[0])):
        stream = await webs[number % GATEWAYS].follow(job_id, last_event_id=last or "0-0")
        async for event in stream:
            if stored([event]):
                resumed += stored([event])
                last = event.id
                break
        stream.close()
    assert resumed == seen[0]


def stored(events: list[SseEvent]) -> list[tuple[str, str]]:
    """Ids and data of the events that the store has, without those of a connection."""
    return [(event.id, event.data) for event in events if event.id and event.name != "hello"]


async def test_who_signs_in_at_one_gateway_is_in_and_out_everywhere(fleet: Fleet) -> None:
    _, webs = await fleet.key("admin")
    text = webs[0].headers["authorization"].removeprefix("Bearer ")
    bare = [Web(url) for url in fleet.urls]
    cookie = await sign_in(bare[0], text)
    assert [await is_in(web, cookie) for web in bare] == [True] * GATEWAYS
    out = await bare[-1].send("POST", "/logout", b"", {**cookie, **OWN})
    assert out.status == 303, out

    async def is_out() -> bool:
        return not any([await is_in(web, cookie) for web in bare])

    await until(is_out, "every gateway has ended the session")


async def test_a_ticket_of_one_gateway_is_good_once_at_all_together(fleet: Fleet) -> None:
    _, webs = await fleet.key()
    job_id = await webs[0].submit()
    for web in webs:
        ticket = (await web.post("/v1/tickets")).json["ticket"]
        tries = [Web(url).get(f"/v1/jobs/{job_id}?ticket={ticket}") for url in fleet.urls]
        got = Counter(reply.status for reply in await asyncio.gather(*tries))
        assert got == {200: 1, 401: GATEWAYS - 1}


async def test_a_lease_that_ran_out_is_taken_back_once(fleet: Fleet) -> None:
    """All four run the upkeep of the plane ten times a second."""
    _, webs = await fleet.key("admin", "jobs:work", "jobs:write")
    body = {"payload": {}, "stream": "leases", "max_attempts": 5}
    job_id = (await webs[0].post("/v1/plane/jobs", body)).json["job_id"]
    asked = {"worker_id": "w1", "streams": ["leases"], "max_wait_ms": 5_000}

    async def claim(web: Web) -> dict[str, object] | None:
        reply = await web.post("/internal/worker/claim", asked)
        assert reply.status in (200, 204), reply
        return reply.json if reply.status == 200 else None

    first = await until(lambda: claim(webs[1]), "the first claim")
    second = await until(lambda: claim(webs[2]), "the lease of the first ran out")
    assert (first["job_id"], second["job_id"]) == (job_id, job_id)
    assert (first["attempt"], second["attempt"]) == (1, 2)
    page = (await webs[3].get(f"/api/queues/plane/jobs/{job_id}/events")).json["events"]
    # The second lease may have run out meanwhile.
    assert [event["step"] for event in page[:4]] == ["submit", "claim", "reap", "claim"]


async def test_a_schedule_makes_one_job_for_each_time(fleet: Fleet) -> None:
    _, webs = await fleet.key("admin", "jobs:work")
    name = f"tick-{secrets.token_hex(4)}"
    body = {"task": name, "payload": {}, "every_ms": EVERY_MS, "missed": "all", "stream": "ticks"}
    put = await webs[0].send(
        "PUT",
        f"/v1/plane/schedules/{name}",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    assert put.status == 200, put
    first_ms = put.json["next_ms"]

    async def jobs() -> list[str]:
        reply = await webs[1].get(f"/api/jobs?limit=500&q=task:{name}")
        assert reply.status == 200, reply
        return [row["job_id"] for row in reply.json["jobs"]]

    found: list[str] = []

    async def enough() -> bool:
        found[:] = await jobs()
        return len(found) >= 20

    await until(enough, "twenty times came")
    assert (await webs[2].send("DELETE", f"/v1/plane/schedules/{name}")).status == 200
    times = [first_ms + EVERY_MS * number for number in range(len(found))]
    assert sorted(found) == sorted(occurrence_id(name, at_ms) for at_ms in times)
