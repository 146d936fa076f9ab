"""What one key can cost a plane: the bytes of claims, claims at once, waits of a revoked key."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from tenure.contracts.plane import schedules as routes
from tenure.contracts.plane.claims import Claims, Tokens, Waiters, _StreamRotation
from tenure.contracts.plane.model import Claim
from tenure.contracts.plane.news import NewsTail, Reader
from tenure.contracts.plane.plane import Plane
from tenure.contracts.plane.queue import PlaneQueue
from tenure.contracts.plane.transports import TakeResult
from tenure.core.errors import UsageError
from tenure.core.lease import Lease, Report
from tenure.core.seam import PAGE_BYTES
from tests.contract.adapters import Servers, Stage, adapters
from tests.contract.gateway.web import JSON, Reply, Web, read_reply
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


SCHEDULE = json.dumps({"task": "tick", "payload": 1, "every_ms": 60_000}).encode()


async def put(web: Web, name: str) -> int:
    return (await web.send("PUT", f"/v1/plane/schedules/{name}", SCHEDULE, JSON)).status


async def test_requests_for_schedules_take_turns_by_key_and_are_read_beside_the_loop(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads all schedules, and a cron pattern without a time takes a tenth of a second."""
    one, other = [(await site.ring.create(("jobs:work",), name))[1] for name in ("one", "other")]
    running = await site.gateway()
    web, others = [Web(running.url, {"x-api-key": key}) for key in (one, other)]
    go, threads = threading.Event(), list[threading.Thread]()
    read = routes.read_schedule

    def held(name: str, given: Any) -> Any:
        threads.append(threading.current_thread())
        if name != "free":
            assert go.wait(60)
        return read(name, given)

    monkeypatch.setattr(routes, "read_schedule", held)
    asked = [asyncio.create_task(put(web, f"s{number}")) for number in range(70)]
    try:
        # One has its turn, 64 wait, and the other five are refused at once.
        await until(lambda: sum(task.done() for task in asked) == 5)
        assert {task.result() for task in asked if task.done()} == {429}
        assert await put(others, "free") == 200
        assert len(threads) == 2
    finally:
        go.set()
    assert sorted(await asyncio.gather(*asked)) == [200] * 65 + [429] * 5
    assert threading.main_thread() not in threads
    assert len((await web.get("/v1/plane/schedules")).json["schedules"]) == 66


def tail_of(site: Site) -> NewsTail:
    return site.ledger().news


A: Reader = ("a", frozenset())
B: Reader = ("b", frozenset())


async def test_who_waits_for_news_is_woken_by_steps_of_its_own_alone(site: Site) -> None:
    """With a thousand who wait, waking all for every step would leave time for nothing else."""
    queue, tail = site.local(), tail_of(site)
    await submit(queue, job())
    begun = await tail.last()
    reading = asyncio.create_task(tail.wait(begun, 60_000, A))
    await until(tail._reading.locked)
    waiting = [asyncio.create_task(tail.wait(begun, 60_000, B)) for _ in range(3)]
    await until(lambda: len(tail._waiting.get(B, ())) == 3)
    at_first = list(tail._waiting[B])
    (of_a,) = await submit(queue, job(requester="a"))
    found, after = await asyncio.wait_for(reading, 60)
    assert ([each.job_id for each in found], after) == ([of_a], await tail.last())
    # One of them reads on; the others sleep, and have nothing to look through later.
    await until(tail._reading.locked)
    asleep = [each for each in at_first if each in tail._waiting[B]]
    assert len(asleep) >= 2
    assert {each.after for each in asleep} == {after}
    (of_b,) = await submit(queue, job(requester="b"))
    for found, _ in await asyncio.wait_for(asyncio.gather(*waiting), 60):
        assert [each.job_id for each in found] == [of_b]
    assert not tail._waiting


async def test_who_reads_for_all_may_leave_at_any_time(site: Site) -> None:
    queue, tail = site.local(), tail_of(site)
    await submit(queue, job())
    begun = await tail.last()
    tasks = [asyncio.create_task(tail.wait(begun, 60_000, B)) for _ in range(4)]
    await until(lambda: len(tail._waiting.get(B, ())) == 4)
    for _ in range(3):
        await until(tail._reading.locked)
        tasks.pop(0).cancel()
        await until(lambda: len(tail._waiting[B]) == len(tasks))
    (of_b,) = await submit(queue, job(requester="b"))
    found, _ = await asyncio.wait_for(tasks[0], 60)
    assert [each.job_id for each in found] == [of_b]


async def test_old_positions_of_a_key_are_read_one_after_the_other(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait from an old position reads the history of everyone, page by page."""
    queue, tail = site.local(), tail_of(site)
    for _ in range(5):
        await queue.submit([job(requester="other") for _ in range(500)])
    read, reading, most = tail._journal.read, 0, 0

    async def counted(**asked: Any) -> Any:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        try:
            return await read(**asked)
        finally:
            reading -= 1

    monkeypatch.setattr(tail._journal, "read", counted)
    end = await tail.last()
    answers = await asyncio.gather(*(tail.wait(0, 50, A) for _ in range(6)))
    assert most == 1
    assert all(found == [] and 1_000 <= after <= end for found, after in answers)
    found, _ = await tail.wait(0, 50, ("other", frozenset()))
    assert [each.position for each in found] == sorted(each.position for each in found)


async def test_a_made_up_position_in_an_empty_journal_holds_up_no_news(site: Site) -> None:
    queue, tail = site.local(), tail_of(site)
    far = asyncio.create_task(tail.wait(10**17, 60_000, A))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(tail.wait(0, 60_000, B))
    await until(lambda: bool(tail._waiting.get(B)))
    (of_b,) = await submit(queue, job(requester="b"))
    found, _ = await asyncio.wait_for(waiting, 30)
    assert [each.job_id for each in found] == [of_b]
    far.cancel()
    await asyncio.gather(far, return_exceptions=True)


async def begin_gather(site: Site, results: Sequence[str]) -> tuple[PlaneQueue, Lease]:
    """A gather whose jobs have ended with these results, and the lease of its last job."""
    queue = site.local()
    flows = queue.features.flows
    assert flows is not None
    await flows.start("sum", [[job() for _ in results], [job()]])
    for result in results:
        lease = await claim_one(queue)
        await settle(queue, lease, "complete", result=result.encode())
    return queue, await claim_one(queue)


async def children(web: Web, lease: Lease) -> Reply:
    asked = {
        "worker_id": "w1",
        "job_id": lease.job_id,
        "attempt_id": f"{lease.job_id}:{lease.fence}",
        "lease_token": lease.token,
        "stream": lease.queue,
    }
    return await web.post("/internal/worker/children", asked)


async def test_results_that_a_job_waited_for_have_a_size_together_over_http(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ['{"n":%s}' % ("1" * 300), json.dumps("é" * 40_000, ensure_ascii=False)]
    _, lease = await begin_gather(site, texts)
    web = await site.web()
    found = (await children(web, lease)).json["results"]
    assert found == {"sum@0.0": json.loads(texts[0]), "sum@0.1": json.loads(texts[1])}
    monkeypatch.setattr("tenure.contracts.plane.plane.RESULTS_CHARS_MAX", 40_000)
    refused = await children(web, lease)
    assert refused.status in (400, 422)
    assert "return references" in refused.json["detail"]


async def test_the_results_that_jobs_waited_for_are_read_by_turns(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are many megabytes, and a worker may ask for them on many connections."""
    _, lease = await begin_gather(site, ["1"])
    keys = [(await site.ring.create(("jobs:work",), name))[1] for name in ("one", "other")]
    running = await site.gateway()
    reading, most, go = 0, 0, asyncio.Event()
    read = Plane.children_results

    async def counted(plane: Plane, lease: Lease) -> dict[str, str]:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await go.wait()
        try:
            return await read(plane, lease)
        finally:
            reading -= 1

    monkeypatch.setattr(Plane, "children_results", counted)
    webs = [Web(running.url, {"x-api-key": key}) for key in keys]
    asked = [asyncio.create_task(children(web, lease)) for web in webs for _ in range(4)]
    await until(lambda: reading == 2, "each key has its turn")
    go.set()
    assert all(reply.json["results"] == {"sum@0.0": 1} for reply in await asyncio.gather(*asked))
    assert most == 2


async def test_answers_that_a_key_does_not_read_are_counted_with_its_bodies(site: Site) -> None:
    """Else one key could have the largest answer on each of a thousand connections."""
    one, other = [
        (await site.ring.create(("jobs:write", "jobs:read"), name))[1] for name in ("one", "other")
    ]
    running = await site.gateway(body_bytes_max=32 << 20)
    bodies = running.gateway._bodies
    bodies._per_caller = 30 << 20
    web, others = [Web(running.url, {"x-api-key": key}) for key in (one, other)]
    job_id = await enqueue(web, payload="x" * (20 << 20))  # more than sockets take up
    path = f"/v1/plane/jobs/{job_id}"
    _, writer = unread = await web.connect()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(web.head("GET", path))
    await until(lambda: bodies.total > 20 << 20)
    refused = await web.get(path)
    assert (refused.status, refused.json["code"]) == (429, "rate_limited")
    assert (await others.get(path)).status == 404
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert (await read_reply(unread[0])).json["job_id"] == job_id
    writer.close()
    await until(lambda: not bodies.total)
    assert (await web.get(path)).status == 200
