"""How many transcodes one requester has at once: a share of each worker, and a quota of its key."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator

import pytest

from tenure.core.job import NewJob
from tenure.core.lease import Lease
from tenure.core.outcome import Outcome
from tenure.core.registry import open_ledger, open_queue
from tenure.core.seam import Queue
from tenure.gateway.keyrings import open_keyring
from tenure.gateway.limits import Quota
from tenure.sql.sql_ledger import SqlLedger
from tests.contract.inbox.conftest import RawSql
from tests.contract.inbox_stage import InboxStage


def of(requester: str, number: int) -> list[NewJob]:
    return [NewJob(task="transcode", payload=b"{}", requester=requester)] * number


async def all_claimed(queue: Queue) -> list[Lease]:
    """What the queue gives, asked for again and again as a worker with many slots does."""
    found: list[Lease] = []
    while leases := await queue.claim(10, wait_ms=0):
        found += leases
    return found


def counted(leases: list[Lease]) -> dict[str, int]:
    return dict(Counter(lease.requester for lease in leases))


@pytest.fixture
async def workers(inbox: InboxStage) -> AsyncGenerator[list[Queue]]:
    url = f"{inbox.url}&share=4&requester_max=6"
    made = [open_queue(url, worker_id=f"w{n}") for n in range(2)]
    yield made
    for queue in made:
        await queue.close()


@pytest.mark.options(lease_ms=30_000)
async def test_one_requester_leaves_a_slot_of_every_worker_to_the_others(
    inbox: InboxStage, workers: list[Queue]
) -> None:
    first, second = workers
    await first.submit(of("flood", 50) + of("late", 3) + of("", 5))
    held = await all_claimed(first)
    assert counted(held) == {"flood": 4, "late": 3, "": 5}, "the anonymous caller has no quota"
    assert counted(await all_claimed(second)) == {"flood": 2}, "6 of all workers together"
    mine = next(lease for lease in held if lease.requester == "flood")
    await first.settle([Outcome(mine, "complete")])
    again = await first.claim(10, wait_ms=1_000)
    assert counted(again) == {"flood": 1}


@pytest.mark.options(lease_ms=30_000)
async def test_a_claim_that_waits_takes_what_another_worker_made_room_for(
    inbox: InboxStage, workers: list[Queue]
) -> None:
    """Nothing rings for it: the job has been waiting all the time."""
    first, second = workers
    await first.submit(of("flood", 50))
    held = await all_claimed(first) + await all_claimed(second)
    assert len(held) == 6
    waiting = asyncio.create_task(second.claim(1, wait_ms=20_000))
    await asyncio.sleep(0.3)  # it has looked at least once, and there is nothing to see of that
    assert not waiting.done()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await first.settle([Outcome(lease, "complete") for lease in held[:2]])
    assert counted(await waiting) == {"flood": 1}
    assert loop.time() - began < 5.0


@pytest.mark.options(lease_ms=30_000)
async def test_a_key_may_have_a_number_of_its_own(inbox: InboxStage, workers: list[Queue]) -> None:
    ring = open_keyring(inbox.url)
    ids = [(await ring.create(("jobs:write",), name))[0].id for name in ("few", "many")]
    assert await ring.limit(ids[0], Quota(transcodes=2))
    assert await ring.limit(ids[1], Quota(transcodes=0))
    assert not await ring.limit("nobody", Quota(transcodes=0))
    await workers[0].submit(of(ids[0], 20) + of(ids[1], 20))
    held = await all_claimed(workers[0]) + await all_claimed(workers[1])
    assert counted(held) == {ids[0]: 2, ids[1]: 8}, "0 is no limit, beside the share of a worker"
    quotas = {key.id: key.quota for key in await ring.list()}
    assert quotas[ids[0]] == Quota(transcodes=2)
    for key_id in ids:
        assert await ring.revoke(key_id)
    await ring.close()


@pytest.mark.raw_writes
@pytest.mark.options(lease_ms=30_000)
@pytest.mark.parametrize(
    "quota",
    ['{"transcodes":', '{"transcodes":1,}', '{"transcodes":"x"}', '{"transcodes":-9}', "[[", ""],
)
async def test_a_quota_that_cannot_be_read_counts_as_none(
    inbox: InboxStage, workers: list[Queue], sql: RawSql, quota: str
) -> None:
    """It made every claim fail, of all requesters."""
    ring = open_keyring(inbox.url)
    key = (await ring.create(("jobs:write",), "damaged"))[0].id
    await sql("UPDATE api_keys SET quota = ? WHERE key_id = ?", quota, key)
    await workers[0].submit(of(key, 20) + of("other", 3))
    assert counted(await all_claimed(workers[0])) == {key: 4, "other": 3}
    assert counted(await all_claimed(workers[1])) == {key: 2}, "6 of all workers, by the settings"
    await sql("DELETE FROM api_keys WHERE key_id = ?", key)
    await ring.close()


@pytest.mark.options(lease_ms=30_000)
@pytest.mark.parametrize(
    "quota", ['{"transcodes":5}', ' { "depth" : 7 , "transcodes" : 5, "rate_per_s": 1.5e+0 } ']
)
async def test_a_quota_is_read_however_it_is_spaced(
    inbox: InboxStage, workers: list[Queue], sql: RawSql, quota: str
) -> None:
    ring = open_keyring(inbox.url)
    key = (await ring.create(("jobs:write",), "spaced"))[0].id
    await sql("UPDATE api_keys SET quota = ? WHERE key_id = ?", quota, key)
    await workers[0].submit(of(key, 20))
    assert len(await all_claimed(workers[0]) + await all_claimed(workers[1])) == 5
    assert await ring.revoke(key)
    await ring.close()


@pytest.mark.options(lease_ms=30_000)
async def test_without_a_share_a_claim_takes_what_it_asked_for(inbox: InboxStage) -> None:
    queue = open_queue(inbox.url, worker_id="w")
    await queue.submit(of("flood", 20))
    assert len(await queue.claim(10, wait_ms=0)) == 10
    await queue.close()


@pytest.mark.options(lease_ms=30_000)
async def test_unfinished_jobs_of_a_requester_are_counted_up_to_a_number(inbox: InboxStage) -> None:
    queue, ledger = open_queue(inbox.url, worker_id="w"), open_ledger(inbox.url)
    assert isinstance(ledger, SqlLedger)
    later = NewJob(task="transcode", payload=b"{}", requester="a", delay_ms=60_000)
    await queue.submit([*of("a", 5), later, *of("b", 7)])
    assert await ledger.unfinished("a", 100) == 6
    leases = await queue.claim(3, wait_ms=0)
    assert await ledger.unfinished("a", 100) == 6, "what runs is unfinished"
    await queue.settle([Outcome(lease, "complete") for lease in leases])
    assert await ledger.unfinished("a", 100) == 3
    assert await ledger.unfinished("b", 100) == 7
    assert await ledger.unfinished("b", 4) == 4
    assert await ledger.unfinished("c", 100) == 0
    await queue.close()
    await ledger.close()
