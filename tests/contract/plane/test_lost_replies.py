"""Lost answers: every verb is executed, its answer dropped, and sent again; 200 times each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from tenure.core.errors import StoreError
from tenure.core.job import NewJob
from tenure.core.lease import Lease
from tenure.core.outcome import Buried, Completed, Failure, Outcome, Retried
from tenure.core.seam import Query
from tests.chaos.verdict import Snapshot, check
from tests.contract.http_proxy import HttpProxy
from tests.contract.plane.conftest import Site

ROUNDS = 200
FAILURE = Failure(code="Broken", message="it broke")
T = TypeVar("T")


class Stage:
    """A worker behind a proxy that loses the answer to each call once."""

    def __init__(self, site: Site, proxy: HttpProxy) -> None:
        self.site = site
        self.proxy = proxy
        self.queue = site.worker(proxy.url)

    async def lost_once(self, path: str, call: Callable[[], Awaitable[T]]) -> T:
        """The answer of a call whose first answer was executed and dropped."""
        self.proxy.drop_reply(path)
        with pytest.raises(StoreError):
            await call()
        return await call()

    async def judged(self) -> None:
        """The whole history is sound, and agrees with the store."""
        ledger, journal = self.site.ledger(), self.site.journal()
        events = []
        while more := await journal.read(after=events[-1].seq if events else ""):
            events += more
        page = await ledger.find(Query(limit=2 * ROUNDS))
        told = {record.job_id: await ledger.events(record.job_id) for record in page.jobs}
        snapshot = Snapshot(records=page.jobs, events=told)
        verdict = check(events, snapshot=snapshot, quiesced=False)
        assert verdict.ok, str(verdict)


@pytest.fixture
async def lossy(site: Site) -> Stage:
    running = await site.gateway(site.url(lease_ms=60_000, retry_delay_ms=60_000))
    proxy = await HttpProxy(running.url).start()
    site.stack.push_async_callback(proxy.stop)
    return Stage(site, proxy)


def job(number: int) -> NewJob:
    return NewJob(task="work", payload=b"%d" % number, job_id=f"job-{number}", max_attempts=3)


@pytest.mark.clause("P-1", "P-6")
async def test_no_submit_and_no_claim_is_lost_or_doubled(lossy: Stage) -> None:
    queue = lossy.queue
    for number in range(ROUNDS):
        (stored,) = await lossy.lost_once("/v1/plane/jobs", lambda n=number: queue.submit([job(n)]))
        assert stored.status == "replayed"
    leases: list[Lease] = []
    for _ in range(ROUNDS):
        leases += await lossy.lost_once("claim", lambda: queue.claim(1, wait_ms=0))
    assert sorted(lease.job_id for lease in leases) == sorted(job(n).job_id for n in range(ROUNDS))
    assert {(lease.attempt, lease.fence) for lease in leases} == {(1, 1)}
    assert await queue.claim(10, wait_ms=0) == []
    assert lossy.proxy.dropped == 2 * ROUNDS
    await lossy.judged()


@pytest.mark.clause("P-11", "P-12", "P-15")
async def test_no_heartbeat_and_no_complete_is_lost_or_doubled(lossy: Stage) -> None:
    queue = lossy.queue
    await queue.submit([job(number) for number in range(ROUNDS)])
    leases = await queue.claim(ROUNDS, wait_ms=0)
    for lease in leases:
        (kept,) = await lossy.lost_once("heartbeat", lambda it=lease: queue.extend([it]))
        assert isinstance(kept, Lease)
        outcome = Outcome(lease, "complete", lease.payload)
        (verdict,) = await lossy.lost_once("complete", lambda it=outcome: queue.settle([it]))
        assert isinstance(verdict, Completed)
    assert lossy.proxy.dropped == 2 * ROUNDS
    counts = await lossy.site.ledger().counts()
    assert counts.states["SUCCEEDED"] == ROUNDS
    await lossy.judged()


@pytest.mark.clause("P-13", "P-15")
async def test_no_fail_is_lost_or_doubled(lossy: Stage) -> None:
    queue = lossy.queue
    await queue.submit([job(number) for number in range(ROUNDS)])
    leases = await queue.claim(ROUNDS, wait_ms=0)
    for number, lease in enumerate(leases):
        failure = Failure(code="Broken", message="it broke", retryable=bool(number % 2))
        outcome = Outcome(lease, "fail", failure=failure)
        (verdict,) = await lossy.lost_once("fail", lambda it=outcome: queue.settle([it]))
        assert isinstance(verdict, Retried if number % 2 else Buried)
    counts = await lossy.site.ledger().counts()
    assert (counts.states["QUEUED"], counts.states["DLQ"]) == (ROUNDS // 2, ROUNDS // 2)
    await lossy.judged()


@pytest.mark.clause("P-6", "P-10")
async def test_a_claim_that_waited_and_whose_answer_was_lost_is_found_again(lossy: Stage) -> None:
    queue, producer = lossy.queue, lossy.site.local(lease_ms=60_000)
    for number in range(20):
        lossy.proxy.drop_reply("claim")
        waiting = asyncio.create_task(queue.claim(1, wait_ms=20_000))
        await asyncio.sleep(0)
        await producer.submit([job(number)])
        with pytest.raises(StoreError):
            await waiting
        (lease,) = await queue.claim(1, wait_ms=20_000)
        assert (lease.job_id, lease.attempt) == (f"job-{number}", 1)
