"""Quotas of keys: what one key may ask for, how it is told, and that others are not touched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tenure.contracts.streams.ledger import StreamsLedger
from tenure.core.job import NewJob, Submitted
from tenure.gateway.keyrings import open_keyring
from tenure.gateway.limits import DepthLimit, Quota
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.test_access import ALL, BODY
from tests.contract.gateway.test_refusals import is_problem
from tests.contract.gateway.web import Web
from tests.waiting import until


class Tenants:
    """Keys of one ring, each with a client."""

    def __init__(self, ring_url: str, gateway_url: str) -> None:
        self.ring = open_keyring(ring_url)
        self._url = gateway_url

    async def new(self, *scopes: str, **numbers: float) -> Web:
        key, text = await self.ring.create((*(scopes or ALL), "metrics"), "tenant")
        assert await self.ring.limit(key.id, Quota(**numbers))  # type: ignore[arg-type]
        return Web(self._url, {"authorization": f"Bearer {text}"})


@pytest.fixture(params=["redis", "sqlite"])
def places(request: pytest.FixtureRequest, site: Site, tmp_path: Path) -> tuple[Site, str]:
    """A site, and the URL of the store that keeps the keys: every ring keeps quotas."""
    plane = f"plane+sqlite:///{tmp_path}/plane.db?synchronous=normal"
    return site, site.url() if request.param == "redis" else plane


async def tenants(places: tuple[Site, str], **settings: float) -> Tenants:
    site, ring_url = places
    queues = tuple(dict.fromkeys((site.url(), ring_url)))
    gateway = await site.gateway(queues=queues, **settings)
    return Tenants(ring_url, gateway.url)


async def refusals(web: Web, quota: str) -> float:
    page = (await web.get("/metrics")).body.decode()
    line = next((x for x in page.splitlines() if f'refusals_total{{quota="{quota}"}}' in x), "x 0")
    return float(line.split()[-1])


def told(problem: dict[str, str], limit: str, option: str, setting: str) -> bool:
    """Whether a refusal says what the limit is and how it is raised."""
    detail = problem["detail"]
    return all(word in detail for word in (limit, f"tenure keys limit KEY_ID {option}", setting))


async def test_the_rate_of_a_key_is_its_own_and_its_refusal_is_counted(
    places: tuple[Site, str],
) -> None:
    made = await tenants(places, rate_per_s=0.01, rate_burst=2)
    usual, fast, slow = [
        await made.new(),
        await made.new(rate_per_s=0),
        await made.new(rate_per_s=0.5, rate_burst=1),
    ]
    assert [(await usual.get("/v1/jobs")).status for _ in range(3)] == [200, 200, 429]
    assert [(await fast.get("/v1/jobs")).status for _ in range(9)] == [200] * 9
    assert (await slow.get("/v1/jobs")).status == 200
    reply = await slow.get("/v1/jobs")
    problem = is_problem(reply, 429, "rate_limited")
    assert told(problem, "0.5 requests a second", "--rate", "gateway.rate_per_s")
    assert reply.headers["retry-after"] == "2"
    assert await refusals(fast, "rate") == 2
    await made.ring.close()


async def test_workers_are_not_in_the_rate(site: Site, tmp_path: Path) -> None:
    url = f"plane+sqlite:///{tmp_path}/plane.db?synchronous=normal"
    made = await tenants((site, url), rate_per_s=0.01, rate_burst=1)
    worker = await made.new("jobs:work")
    body = {"worker_id": "w1"}
    statuses = [(await worker.post("/internal/worker/claim", body)).status for _ in range(5)]
    assert 429 not in statuses
    assert statuses[0] < 300, statuses
    await made.ring.close()


async def test_the_largest_body_of_a_key_is_its_own(places: tuple[Site, str]) -> None:
    made = await tenants(places)
    usual, small, large = [
        await made.new(),
        await made.new(body_bytes=1_000),
        await made.new(body_bytes=400_000),
    ]
    body = {"task": "chat", "payload": {"text": "x" * 1_000}}
    assert (await usual.post("/v1/jobs", body)).status == 202
    problem = is_problem(await small.post("/v1/jobs", body), 413, "too_large")
    assert told(problem, "1000 bytes", "--body", "gateway.body_bytes_max")
    body["payload"] = {"text": "x" * 300_000}
    assert (await usual.post("/v1/jobs", body)).status == 413
    assert (await large.post("/v1/jobs", body)).status == 202
    assert await refusals(usual, "body") == 2
    await made.ring.close()


async def test_the_open_streams_of_a_key_are_its_own(places: tuple[Site, str]) -> None:
    made = await tenants(places, streams_per_key=1)
    usual, many = await made.new(), await made.new(streams=3)
    for web, most in ((usual, 1), (many, 3)):
        path = f"/v1/jobs/{await web.submit()}/events"
        streams = [await web.stream(path) for _ in range(most)]
        problem = is_problem(await web.get(path), 429, "too_many_streams")
        assert told(problem, f"at most {most} event streams", "--streams", "streams_per_key")
        for stream in streams:
            stream.close()
    assert await refusals(usual, "streams") == 2
    await made.ring.close()


async def test_the_unfinished_jobs_of_a_key_are_limited_and_no_job_is_lost(
    places: tuple[Site, str],
) -> None:
    site, _ = places
    made = await tenants(places, depth_per_key=3)
    usual, more = await made.new(), await made.new(depth=5)
    assert [(await usual.post("/v1/jobs", BODY)).status for _ in range(3)] == [202] * 3
    reply = await usual.post("/v1/jobs", BODY)
    problem = is_problem(reply, 429, "queue_full")
    assert told(problem, "3 unfinished jobs", "--depth", "gateway.depth_per_key")
    assert int(reply.headers["retry-after"]) >= 1
    statuses = [(await more.post("/v1/jobs", BODY)).status for _ in range(6)]
    assert statuses == [202] * 5 + [429]
    assert await refusals(usual, "depth") == 2
    assert (await site.ledger.counts()).states["queued"] == 8, "what was refused was not stored"
    lease = await site.claim()
    await site.finish(lease)

    async def has_room() -> bool:
        return (await usual.post("/v1/jobs", BODY)).status == 202

    await until(has_room, "an ended job makes room")
    await made.ring.close()


async def test_two_gateways_count_the_same_jobs(site: Site) -> None:
    made = await tenants((site, site.url()), depth_per_key=3)
    web = await made.new()
    other = Web((await site.gateway(depth_per_key=3)).url, web.headers)
    assert [(await web.post("/v1/jobs", BODY)).status for _ in range(3)] == [202] * 3

    async def is_full() -> bool:
        return (await other.post("/v1/jobs", BODY)).status == 429

    await until(is_full, "the other gateway hears of them")
    assert (await site.ledger.counts()).states["queued"] <= 6
    await made.ring.close()


async def test_jobs_of_a_list_beyond_the_depth_are_told_one_by_one(tmp_path: Path) -> None:
    url = f"plane+sqlite:///{tmp_path}/plane.db?synchronous=normal"
    settings = GatewaySettings(queues=(url,), port=0, depth_per_key=3)
    async with serving(settings) as gateway:
        made = Tenants(url, gateway.url)
        web = await made.new()
        body = {"jobs": [{"task": "t", "payload": {"n": n}} for n in range(5)]}
        results = (await web.post("/v1/plane/jobs", body)).json["results"]
        assert [each["status"] for each in results] == ["created"] * 3 + ["full"] * 2
        assert "3 unfinished jobs" in results[-1]["reason"]
        problem = is_problem(await web.post("/v1/plane/jobs", body["jobs"][0]), 429, "queue_full")
        assert told(problem, "3 unfinished jobs", "--depth", "gateway.depth_per_key")
        await made.ring.close()


class Stored:
    """A queue that takes everything, beside a real ledger."""

    def __init__(self) -> None:
        self.jobs = 0

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        self.jobs += len(jobs)
        return [Submitted(str(n), "created") for n in range(len(jobs))]


async def test_a_submit_below_the_limit_asks_the_store_for_no_count(site: Site) -> None:
    """Only the first does, and it does not wait for the answer."""
    asked = []

    class Counting:
        async def unfinished(self, requester: str, most: int) -> int:
            asked.append(requester)
            return await site.ledger.unfinished(requester, most)

    queue = Stored()
    limit = DepthLimit(queue, Counting().unfinished, lambda _: Quota(depth=2_000), lambda: None)
    for _ in range(1_500):
        await limit.submit([NewJob(task="t", payload=b"{}", requester="k1")])
    await until(lambda: bool(asked), "it is counted beside the submits")
    for _ in range(100):
        await limit.submit([NewJob(task="t", payload=b"{}", requester="k1")])
    assert (queue.jobs, asked) == (1_600, ["k1"])
    await limit.submit([NewJob(task="t", payload=b"{}")] * 100)
    assert (queue.jobs, asked) == (1_700, ["k1"]), "anonymous callers are not counted"


@pytest.mark.parametrize("delay_ms", [0, 60_000])
async def test_of_many_jobs_the_share_of_a_requester_is_estimated(
    site: Site, delay_ms: int
) -> None:
    def jobs(requester: str, number: int) -> list[NewJob]:
        one = NewJob(task="t", payload=b"{}", requester=requester, delay_ms=delay_ms)
        return [one] * number

    for _ in range(10):
        await site.worker.submit(jobs("big", 75) + jobs("small", 25))
    ledger: StreamsLedger = site.ledger
    assert await ledger.unfinished("small", 5_000) == 1_000, "all there are is less than that"
    assert 100 <= await ledger.unfinished("small", 100) <= 400
    assert 600 <= await ledger.unfinished("big", 100) <= 900
    assert await ledger.unfinished("nobody", 100) == 0


@pytest.mark.parametrize("delay_ms", [0, 60_000])
async def test_the_backlog_of_another_requester_is_not_taken_for_ones_own(
    site: Site, delay_ms: int
) -> None:
    def jobs(requester: str, number: int, delay_ms: int = delay_ms) -> list[NewJob]:
        one = NewJob(task="t", payload=b"{}", requester=requester, delay_ms=delay_ms)
        return [one] * number

    ledger: StreamsLedger = site.ledger
    for _ in range(4):
        await site.worker.submit(jobs("big", 1_000))
    for _ in range(8):
        await asyncio.sleep(0.05)  # the times of submits matter, and they are the store's
        await site.worker.submit(jobs("small", 4))
    assert await ledger.unfinished("small", 400) < 200
    assert 3_600 <= await ledger.unfinished("big", 400) <= 4_032
    if not delay_ms:
        await site.worker.claim(500, wait_ms=0)
        assert await ledger.unfinished("small", 400) < 200
        assert 3_600 <= await ledger.unfinished("big", 400) <= 4_032


async def test_jobs_that_became_due_count_for_their_requester(site: Site) -> None:
    due = NewJob(task="t", payload=b"{}", requester="big", delay_ms=1)
    ledger: StreamsLedger = site.ledger
    await site.worker.submit([due] * 1_000)
    await asyncio.sleep(0.05)  # until the jobs are due by the store's clock
    while (await site.worker.upkeep()).promoted:
        pass
    await site.worker.submit([NewJob(task="t", payload=b"{}", requester="small")] * 32)
    assert await ledger.unfinished("small", 400) < 100
    assert 900 <= await ledger.unfinished("big", 400) <= 1_032
