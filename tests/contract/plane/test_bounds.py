"""What one key can cost a plane: the bytes of claims, claims at once, waits of a revoked key."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from tenure.contracts.plane.claims import Claims, Tokens, Waiters, _StreamRotation
from tenure.contracts.plane.model import Claim
from tenure.contracts.plane.transports import TakeResult
from tenure.core.errors import UsageError
from tenure.core.lease import Lease, Report
from tenure.core.registry import open_queue
from tenure.core.seam import PAGE_BYTES
from tests.contract.adapters import Servers, Stage, adapters, served_url
from tests.contract.gateway.web import Web
from tests.contract.plane.conftest import Site, claim, enqueue, proof, verb
from tests.contract.suite.acting import claim_one, job, settle, submit
from tests.waiting import until

LARGE = b'"%b"' % (b"x" * 1_000_000)
PLANES = ("plane", "plane_postgres", "plane_redis", "plane_postgres_redis")


@pytest.fixture(params=PLANES)
async def plane(request: pytest.FixtureRequest, servers: Servers) -> AsyncGenerator[Stage]:
    stage = await adapters(servers)[request.param].open(lease_ms=60_000)
    yield stage
    await stage.close()


def size(leases: Sequence[Lease]) -> int:
    return sum(len(lease.payload) for lease in leases)


@pytest.mark.clause("P-7")
async def test_a_claim_ends_at_a_number_of_bytes_and_the_next_goes_on(plane: Stage) -> None:
    queue = plane.queue("w1")
    made = [(await submit(queue, job(payload=LARGE)))[0] for _ in range(12)]
    made += await submit(queue, job(), job())
    claims: list[list[Lease]] = []
    while leases := await queue.claim(100, wait_ms=50):
        assert size(leases[:-1]) < PAGE_BYTES
        claims.append(leases)
    assert [len(leases) for leases in claims] == [5, 5, 4]
    assert [lease.job_id for leases in claims for lease in leases] == made
    for lease in (lease for leases in claims for lease in leases):
        await settle(queue, lease, "complete")
    assert (await plane.ledger.counts()).states["SUCCEEDED"] == 14


@pytest.mark.clause("P-7")
async def test_of_claims_that_arrive_together_each_gets_its_own_bytes(plane: Stage) -> None:
    queues = [plane.queue(f"w{number}") for number in range(3)]
    made = [(await submit(queues[0], job(payload=LARGE)))[0] for _ in range(18)]
    claims = await asyncio.gather(*(queue.claim(6, wait_ms=5_000) for queue in queues))
    assert all(leases and size(leases[:-1]) < PAGE_BYTES for leases in claims)
    while leases := await queues[0].claim(6, wait_ms=50):
        claims.append(leases)
    assert sorted(lease.job_id for leases in claims for lease in leases) == sorted(made)


@pytest.mark.clause("P-7")
async def test_a_job_that_is_larger_than_the_bytes_of_a_claim_is_taken(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure.contracts.plane.transports.PAGE_BYTES", 10)
    web = await site.web()
    made = [await enqueue(web, payload="x" * 100) for _ in range(2)]
    taken = [(await verb(web, "claim", max_jobs=9))["jobs"] for _ in range(2)]
    assert [[each["job_id"] for each in jobs] for jobs in taken] == [[made[0]], [made[1]]]


@pytest.mark.clause("P-10")
async def test_leases_of_a_lost_answer_are_given_again_in_bounded_answers(plane: Stage) -> None:
    queue, web = plane.queue("w1"), Web(served(plane))
    for _ in range(10):
        await submit(queue, job(payload=LARGE))
    taken = []
    for _ in range(2):  # a worker that uses one claim id for two claims
        fresh = await verb(web, "claim", max_jobs=100, claim_id="one", fresh=True)
        taken += [each["job_id"] for each in fresh["jobs"]]
    assert len(taken) == 10
    again = await verb(web, "claim", max_jobs=100, claim_id="one")
    assert [each["job_id"] for each in again["jobs"]] == taken[:5]


def served(stage: Stage) -> str:
    return stage.url.removeprefix("plane+").partition("?")[0]  # type: ignore[attr-defined,no-any-return]


class SlowTransport:
    """A transport whose claims wait until the test opens it."""

    def __init__(self) -> None:
        self.taking = self.most = 0
        self.open = asyncio.Event()

    async def take(self, *_: object) -> TakeResult:
        self.taking += 1
        self.most = max(self.most, self.taking)
        await self.open.wait()
        self.taking -= 1
        return TakeResult([])


@pytest.mark.clause("P-7")
@pytest.mark.parametrize("wait_ms", [0, 1])
async def test_a_key_has_a_bounded_number_of_claims_that_take_jobs_at_once(wait_ms: int) -> None:
    transport: Any = SlowTransport()
    claims = Claims(None, transport, Waiters(QuietListener), no_settle)  # type: ignore[arg-type]

    async def take(requester: str) -> None:
        asked = Claim(worker_id="w", requester=requester, wait_ms=wait_ms)
        assert await claims.take(asked, ("jobs",), "w", Tokens("secret")) == []

    tasks = [asyncio.create_task(take("one")) for _ in range(40)]
    await until(lambda: transport.taking == 16)
    tasks += [asyncio.create_task(take("other")) for _ in range(4)]
    await until(lambda: transport.taking == 20)
    transport.open.set()
    await asyncio.gather(*tasks)
    assert transport.most == 20


class QuietListener:
    """Hears nothing."""

    def __init__(self, stream: str) -> None:
        self.stream = stream

    async def arm(self) -> bool:
        return False

    async def wait(self, wait_ms: int) -> None:
        await asyncio.sleep(wait_ms / 1000)  # a listener that hears nothing waits for so long

    async def disarm(self, *, more: bool) -> None:
        pass

    async def close(self) -> None:
        pass


async def no_settle(outcomes: object) -> list[Any]:
    raise AssertionError(outcomes)


@pytest.mark.clause("P-20")
@pytest.mark.parametrize("claim_id", ["", "c1"])
async def test_a_claim_that_waits_gets_no_job_after_its_key_was_revoked(
    site: Site, claim_id: str
) -> None:
    worker, worker_text = await site.ring.create(("jobs:work",), "worker")
    _, tenant_text = await site.ring.create(("jobs:write", "jobs:read"), "tenant")
    running = await site.gateway()
    web = Web(running.url, {"x-api-key": worker_text})
    tenant = Web(running.url, {"x-api-key": tenant_text})
    waiting = asyncio.create_task(verb(web, "claim", max_wait_ms=20_000, claim_id=claim_id))
    await until(lambda: len(running.gateway.queues[0].queue.plane._waiters) == 1)  # type: ignore[attr-defined]
    await site.ring.revoke(worker.id)
    await until(lambda: is_refused(web), "the key is out")
    job_id = await enqueue(tenant)
    assert await waiting == {"claimed": False}
    assert (await tenant.get(f"/v1/plane/jobs/{job_id}")).json["status"] == "QUEUED"


@pytest.mark.clause("P-20")
async def test_a_wait_for_news_tells_nothing_after_its_key_was_revoked(site: Site) -> None:
    tenant, text = await site.ring.create(("jobs:write", "jobs:read"), "tenant")
    _, worker_text = await site.ring.create(("jobs:work",), "worker")
    running = await site.gateway()
    web = Web(running.url, {"x-api-key": text})
    await enqueue(web)
    after = (await web.get("/v1/plane/news")).json["after"]
    waiting = asyncio.create_task(web.get(f"/v1/plane/news?after={after}&wait_ms=20000"))
    reading = running.gateway.queues[0].ledger.news._reading  # type: ignore[attr-defined]
    await until(reading.locked)
    await site.ring.revoke(tenant.id)
    await until(lambda: is_refused(web), "the key is out")
    await claim(Web(running.url, {"x-api-key": worker_text}))
    assert (await waiting).json == {"after": after, "moved": []}


async def is_refused(web: Web) -> bool:
    reply = await web.post("/internal/worker/claim", {"worker_id": "w1"})
    return reply.status == 401


@pytest.mark.parametrize("name", ["succeeded", "dead_letter"])
async def test_a_report_that_is_called_like_an_end_ends_no_stream(site: Site, name: str) -> None:
    web = await site.web()
    await enqueue(web)
    lease = await claim(web)
    report = proof(lease) | {"stream": lease["stream"]["name"], "type": name}
    await verb(web, "report", reports=[report])
    path = f"/v1/plane/jobs/{lease['job_id']}/history"
    assert [each["type"] for each in (await web.get(path)).json["events"]][-1] == name
    await verb(web, "complete", **proof(lease), result=1)
    events = [each["type"] for each in (await web.get(path)).json["events"]]
    assert events == ["QUEUED", "RUNNING", name, "SUCCEEDED"]


@pytest.mark.clause("P-22")
async def test_a_progress_has_a_largest_size(plane: Stage) -> None:
    queue = plane.queue("w1")
    await submit(queue, job())
    lease = await claim_one(queue)
    with pytest.raises(UsageError, match="65536"):
        await queue.report([Report(lease=lease, progress=b'"%b"' % (b"x" * 65_536))])
    assert await queue.report([Report(lease=lease, progress=b'"%b"' % (b"x" * 65_000))]) == [None]


def test_the_orders_of_streams_that_fairness_remembers_are_bounded() -> None:
    rotation = _StreamRotation(8)
    for number in range(5_000):
        rotation.order(("jobs", f"other{number}"))
    assert len(rotation._claims) <= 1_000


@pytest.mark.clause("M-25")
async def test_the_results_that_a_job_waited_for_are_bounded_over_http(plane: Stage) -> None:
    """Workers over HTTP make them: of many steps they would fill the memory of the gateway."""
    local, queue = open_queue(served_url(plane), worker_id="starter"), plane.queue("w1")
    assert local.features.flows is not None
    assert queue.features.flows is not None
    try:
        for name, steps in (("small", 2), ("large", 6)):
            await local.features.flows.start(name, [[job() for _ in range(steps)], [job()]])
            for _ in range(steps):
                await settle(queue, await claim_one(queue), "complete", result=LARGE)
            last = await claim_one(queue)
            if name == "small":
                assert len(await queue.features.flows.children(last)) == 2
            else:
                with pytest.raises(UsageError, match="over HTTP a job gets 4194304"):
                    await queue.features.flows.children(last)
                assert len(await local.features.flows.children(last)) == 6
            await settle(queue, last, "complete")
    finally:
        await local.close()
