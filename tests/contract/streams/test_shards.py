"""A queue with shards: what it adds to the conformance suite, which runs over it too."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import count, islice
from typing import Any, cast

import pytest

from tenure.contracts.streams.doctor import queue_findings
from tenure.contracts.streams.options import Options
from tenure.contracts.streams.sharded_ledger import ShardedJournal, ShardedLedger
from tenure.contracts.streams.sharded_queue import ShardedQueue
from tenure.contracts.streams.shards import shard_namespaces, shard_of
from tenure.core.errors import UsageError
from tenure.core.job import NewJob
from tenure.core.journal import JournalEvent
from tenure.core.lease import Lease
from tenure.core.outcome import Outcome
from tenure.core.registry import journal_urls, open_journal, open_queue
from tenure.core.seam import Query
from tenure.store.redis import Redis
from tenure.store.redis.cluster import SLOTS, slot_of
from tests.chaos.proxy import LossyProxy
from tests.contract.streams.conftest import Bench
from tests.waiting import until

SHARDS = 3


class Sharded:
    """A queue of three shards on the private server."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.url = bench.url(shards=SHARDS)
        self.queue = cast("ShardedQueue", bench.queue(shards=SHARDS))
        self.ledger = cast("ShardedLedger", bench.ledger(shards=SHARDS))
        self.journal = cast("ShardedJournal", bench._keep(open_journal(self.url)))
        self.namespaces = shard_namespaces(bench.ns, SHARDS)

    async def submit(self, *ids: str, **fields: Any) -> None:
        answers = await self.queue.submit(
            [NewJob(task="work", payload=b"{}", job_id=job_id, **fields) for job_id in ids]
        )
        assert [answer.status for answer in answers] == ["created"] * len(ids)

    async def complete(self, leases: Sequence[Lease]) -> None:
        await self.queue.settle([Outcome(lease, "complete") for lease in leases])

    async def history(self, limit: int = 1000) -> list[JournalEvent]:
        events: list[JournalEvent] = []
        while more := await self.journal.read(after=events[-1].seq if events else "", limit=limit):
            events += more
        return events


@pytest.fixture
def sharded(bench: Bench) -> Sharded:
    return Sharded(bench)


def ids_of(shard: int, most: int) -> list[str]:
    """Some ids of jobs that are in this shard."""
    every = (f"j{number}" for number in count())
    return list(islice((each for each in every if shard_of(each, SHARDS) == shard), most))


@pytest.mark.parametrize("shards", [2, 3, 7, 64])
@pytest.mark.parametrize("namespace", ["", "shop:", "{shop}:"])
def test_shards_spread_evenly_over_the_slots(namespace: str, shards: int) -> None:
    places = [slot_of(f"{each}jobs:stream") for each in shard_namespaces(namespace, shards)]
    assert [place * shards // SLOTS for place in places] == list(range(shards))


@pytest.mark.clause("S-52")
async def test_a_job_and_its_keys_are_in_the_shard_that_its_id_names(sharded: Sharded) -> None:
    ids = [f"a{number}" for number in range(12)]
    await sharded.submit(*ids)
    for job_id in ids:
        key = f"{sharded.namespaces[shard_of(job_id, SHARDS)]}job:{job_id}"
        assert await sharded.bench.outside.exists(key, f"{key}:events") == 2
    keys = [key async for key in sharded.bench.outside.scan_iter(match=f"*{sharded.bench.ns}*")]
    tags = Counter(key.partition("}")[0] for key in keys)
    assert tags.keys() == {
        f"{sharded.bench.ns}jobs:shards",
        *(namespace.partition("}")[0] for namespace in sharded.namespaces),
    }


@pytest.mark.clause("S-52")
async def test_another_number_of_shards_is_refused_by_queue_ledger_and_journal(
    sharded: Sharded,
) -> None:
    bench = sharded.bench
    await sharded.submit("a")
    for others in ({"shards": 4}, {"shards": 1}):
        says = "shards=4" if others["shards"] > 1 else "no shards"
        queue = bench.queue(**others)
        with pytest.raises(UsageError, match=rf"has 3 shards .* says {says}: write shards=3"):
            await queue.claim(1, wait_ms=0)
        with pytest.raises(UsageError, match="write shards=3"):
            await queue.submit([NewJob(task="work", payload=b"{}")])
    with pytest.raises(UsageError, match="write shards=3"):
        await bench.ledger(shards=4).counts()
    with pytest.raises(UsageError, match="write shards=3"):
        await cast("ShardedJournal", bench._keep(open_journal(bench.url(shards=4)))).read()
    assert [lease.job_id for lease in await sharded.queue.claim(5, wait_ms=0)] == ["a"]


@pytest.mark.clause("S-52")
async def test_a_queue_with_jobs_from_before_it_had_shards_is_refused_until_it_is_empty(
    sharded: Sharded,
) -> None:
    before = sharded.bench.queue()
    await before.submit([NewJob(task="work", payload=b"{}")])
    with pytest.raises(UsageError, match="1 jobs are in this queue"):
        await sharded.queue.submit([NewJob(task="work", payload=b"{}")])
    (lease,) = await before.claim(1, wait_ms=0)
    await before.settle([Outcome(lease, "complete")])
    await sharded.submit("a")


@pytest.mark.parametrize(("shards", "says"), [(0, "at least 1"), (129, "at most 128")])
def test_a_number_of_shards_that_cannot_be_is_refused(
    shards: int, says: str, sharded: Sharded
) -> None:
    with pytest.raises(UsageError, match=says):
        sharded.bench.queue(shards=shards)


@pytest.mark.clause("S-53")
async def test_a_key_finds_its_job_wherever_the_id_of_the_request_would_be(
    sharded: Sharded,
) -> None:
    first = ids_of(0, 1)[0]

    async def post(job_id: str, payload: bytes = b"{}") -> Any:
        new = NewJob(task="work", payload=payload, job_id=job_id, idempotency_key="order-17")
        (answer,) = await sharded.queue.submit([new])
        return answer

    created = await post(first)
    assert (created.status, created.job_id) == ("created", first)
    for shard in range(SHARDS):
        again = await post(ids_of(shard, 2)[1])
        assert (again.status, again.job_id) == ("replayed", first)
        assert (await post(ids_of(shard, 2)[1], b'{"other": 1}')).status == "conflict"
    assert (await sharded.ledger.counts()).states["queued"] == 1


@pytest.mark.clause("S-53")
async def test_a_key_that_was_reserved_by_a_submitter_that_died_still_makes_one_job(
    sharded: Sharded,
) -> None:
    """It died between the two steps: the next request with the key takes the reserved id."""
    place = sharded.namespaces[shard_of("order-18", SHARDS)]
    await sharded.bench.outside.set(f"{place}idempotency:order-18", "reserved", ex=60)
    for status in ("created", "replayed"):
        new = NewJob(task="work", payload=b"{}", job_id="", idempotency_key="order-18")
        (answer,) = await sharded.queue.submit([new])
        assert (answer.status, answer.job_id) == (status, "reserved")


@pytest.mark.clause("S-54")
async def test_a_full_shard_does_not_starve_the_others(sharded: Sharded) -> None:
    many, few, fewer = ids_of(0, 300), ids_of(1, 3), ids_of(2, 3)
    await sharded.submit(*many)
    await sharded.submit(*few, *fewer)
    claimed: list[str] = []
    for _ in range(3 * SHARDS):
        leases = await sharded.queue.claim(4, wait_ms=1_000)
        claimed += [lease.job_id for lease in leases]
        await sharded.complete(leases)
    assert {*few, *fewer} <= set(claimed)


@pytest.mark.clause("S-54")
@pytest.mark.parametrize("limit", [1, 7, 100])
async def test_a_claim_takes_all_it_may_wherever_the_jobs_are(sharded: Sharded, limit: int) -> None:
    ids = [*ids_of(1, 60), *ids_of(2, 2)]
    await sharded.submit(*ids)
    claimed: list[Lease] = []
    while leases := await sharded.queue.claim(limit, wait_ms=0):
        assert len(leases) == min(limit, len(ids) - len(claimed))
        claimed += leases
    assert sorted(lease.job_id for lease in claimed) == sorted(ids)


@pytest.fixture
async def proxy(bench: Bench) -> AsyncIterator[LossyProxy]:
    async with LossyProxy(bench.server.url) as between:
        yield between


@pytest.mark.clause("S-54")
async def test_an_idle_worker_waits_in_all_shards_without_asking_again(
    sharded: Sharded, proxy: LossyProxy
) -> None:
    url = f"streams+{proxy.url}?namespace={sharded.bench.ns}&shards={SHARDS}"
    queue = sharded.bench._keep(open_queue(url, worker_id="w1"))
    assert await queue.claim(5, wait_ms=50) == []
    waiting = asyncio.create_task(queue.claim(5, wait_ms=30_000))
    stats = sharded.bench.outside

    async def all_blocked() -> bool:
        clients = await stats.client_list()
        return sum("b" in each["flags"] for each in clients) == SHARDS

    await until(all_blocked)
    before = proxy.requests
    assert await queue.claim(5, wait_ms=200) == []
    assert proxy.requests == before, "the shards that it waits for were asked again"
    for shard in range(SHARDS):
        (job_id,) = ids_of(shard, 1)
        await sharded.submit(job_id)
        leases = await waiting
        assert [lease.job_id for lease in leases] == [job_id]
        waiting = asyncio.create_task(queue.claim(5, wait_ms=30_000))
    waiting.cancel()
    assert proxy.requests - before < 12 * SHARDS


@pytest.mark.clause("S-55")
async def test_the_listing_shows_each_job_once_newest_first_page_by_page(
    sharded: Sharded,
) -> None:
    ids = [f"n{number}" for number in range(40)]
    for job_id in ids:
        await sharded.submit(job_id)
    for limit in (1, 7, 100):
        found, after = [], ""
        while True:
            page = await sharded.ledger.find(Query(limit=limit, after=after))
            assert len(page.jobs) <= limit
            found += page.jobs
            after = page.after
            if not after:
                break
        assert sorted(job.job_id for job in found) == sorted(ids)
        times = [job.created_ms for job in found]
        assert times == sorted(times, reverse=True)
    some = await sharded.ledger.find(Query(states=("done",)))
    assert (some.jobs, some.after) == ([], "")


@pytest.mark.clause("S-55")
@pytest.mark.parametrize("after", ["x", "WyIiXQ", "e30", "1-1_"])
async def test_a_cursor_that_no_page_contained_is_refused(sharded: Sharded, after: str) -> None:
    with pytest.raises(UsageError, match="is not a cursor"):
        await sharded.ledger.find(Query(after=after))
    with pytest.raises(UsageError, match="is not a position"):
        await sharded.journal.read(after=f"{after}!")


@pytest.mark.clause("S-55")
async def test_a_job_whose_record_cannot_be_read_does_not_stop_the_listing(
    sharded: Sharded,
) -> None:
    ids = [*ids_of(0, 5), *ids_of(1, 5)]
    await sharded.submit(*ids)
    for shard in (0, 1):
        key = f"{sharded.namespaces[shard]}job:{ids_of(shard, 5)[4]}"
        await sharded.bench.outside.delete(key)
        await sharded.bench.outside.set(key, "not a hash")
    found, after = [], ""
    for _ in ids:
        page = await sharded.ledger.find(Query(limit=1, after=after))
        found += [job.job_id for job in page.jobs]
        after = page.after
    assert sorted(found) == sorted(ids)
    assert after == "" or not (await sharded.ledger.find(Query(after=after))).jobs


@pytest.mark.clause("S-55")
async def test_counts_and_workers_are_those_of_one_queue(sharded: Sharded) -> None:
    await sharded.submit(*[f"c{number}" for number in range(30)])
    sharded.queue.slots = 8
    await sharded.queue.upkeep()
    leases = await sharded.queue.claim(20, wait_ms=0)
    await sharded.complete(leases[:5])
    counts = await sharded.ledger.counts()
    assert {name: counts.states[name] for name in ("queued", "running", "done")} == {
        "queued": 10,
        "running": 15,
        "done": 5,
    }
    assert (counts.totals["submitted"], counts.workers, counts.paused) == (30, 1, False)
    (beat,) = await sharded.ledger.workers()
    assert (beat.worker_id, beat.slots) == ("w1", 8)
    await sharded.ledger.pause()
    assert (await sharded.ledger.counts()).paused
    assert await sharded.queue.claim(20, wait_ms=0) == []
    await sharded.ledger.resume()
    assert len(await sharded.queue.claim(20, wait_ms=0)) == 10


@pytest.mark.clause("S-55")
@pytest.mark.parametrize("limit", [1, 10, 1000])
async def test_the_journal_has_every_event_once_and_in_the_order_of_each_shard(
    sharded: Sharded, limit: int
) -> None:
    await sharded.submit(*[f"e{number}" for number in range(20)])
    await sharded.complete(await sharded.queue.claim(100, wait_ms=0))
    merged = await sharded.history(limit)
    apart = []
    for url in journal_urls(sharded.url):
        journal = open_journal(url)
        apart.append(await journal.read())
        await journal.close()
    assert len(merged) == sum(map(len, apart)) == 60
    for shard, events in enumerate(apart):
        mine = [event for event in merged if shard_of(event.job_id, SHARDS) == shard]
        assert [(e.job_id, e.type) for e in mine] == [(e.job_id, e.type) for e in events]
    assert len({event.seq for event in merged}) == 60
    middle = merged[30]
    (following, *_) = await sharded.journal.read(after=middle.seq)
    assert (following.job_id, following.type) == (merged[31].job_id, merged[31].type)


@pytest.mark.clause("S-55")
async def test_whoever_waits_for_the_journal_hears_of_every_shard(sharded: Sharded) -> None:
    after = await sharded.journal.last()
    assert await sharded.journal.wait(after=after, wait_ms=20) == []
    for shard in (0, 1, 2, 0):
        waiting = asyncio.create_task(sharded.journal.wait(after=after, wait_ms=20_000))
        job_id = f"w{secrets.token_hex(4)}"
        while shard_of(job_id, SHARDS) != shard:
            job_id = f"w{secrets.token_hex(4)}"
        await sharded.submit(job_id)
        (event,) = await waiting
        assert (event.job_id, event.type) == (job_id, "submit")
        after = event.seq


@pytest.mark.clause("S-55")
async def test_the_events_of_jobs_of_several_shards_are_waited_for_at_once(
    sharded: Sharded,
) -> None:
    ids = [ids_of(shard, 1)[0] for shard in range(SHARDS)]
    await sharded.submit(*ids)
    cursors = {job_id: events[-1].event_id for job_id, events in (
        await sharded.ledger.changes(dict.fromkeys(ids, ""))
    ).items()}  # fmt: skip
    assert cursors.keys() == set(ids)
    for _ in range(2):
        waiting = asyncio.create_task(sharded.ledger.wait_changes(cursors, wait_ms=20_000))
        await asyncio.sleep(0)
        await sharded.ledger.interrupt()
        assert await waiting == {}
    waiting = asyncio.create_task(sharded.ledger.wait_changes(cursors, wait_ms=20_000))
    await sharded.ledger.cancel([ids[2]])
    changed = await waiting
    while not changed:  # an interrupt of before may have ended it
        changed = await sharded.ledger.wait_changes(cursors, wait_ms=20_000)
    assert {job_id: [e.type for e in events] for job_id, events in changed.items()} == {
        ids[2]: ["canceled"]
    }


@pytest.mark.clause("S-54")
async def test_the_shards_of_one_node_are_asked_in_one_write(sharded: Sharded) -> None:
    async with LossyProxy(sharded.bench.server.url, speaks="bytes") as pieces:
        url = f"streams+{pieces.url}?namespace={sharded.bench.ns}&shards={SHARDS}"
        queue = sharded.bench._keep(open_queue(url, worker_id="w1"))
        await queue.claim(60, wait_ms=0)
        await sharded.submit(*[f"p{number}" for number in range(90)])
        before = pieces.requests
        leases = await queue.claim(50 * SHARDS, wait_ms=0)
        leases.sort(key=lambda lease: lease.job_id)
        assert len(leases) == 90
        assert pieces.requests - before == 1
        await queue.settle(
            [Outcome(lease, "complete") for lease in leases[:60]]
        )  # loads the script
        before = pieces.requests
        assert {shard_of(lease.job_id, SHARDS) for lease in leases[60:]} == {0, 1, 2}
        await queue.settle([Outcome(lease, "complete") for lease in leases[60:]])
        assert pieces.requests - before == 1


async def test_doctor_says_in_which_shards_something_is_wrong(sharded: Sharded) -> None:
    options = Options(namespace=sharded.bench.ns, shards=SHARDS)
    redis = Redis(sharded.bench.server.url)
    await sharded.submit(*ids_of(1, 3))
    found = {finding.check: finding for finding in await queue_findings(redis, options)}
    assert found["consumer group"].detail == "shard 1: 3 jobs, no group"
    await sharded.complete(await sharded.queue.claim(10, wait_ms=0))
    await sharded.ledger.pause()
    findings = await queue_findings(redis, options)
    found = {finding.check: finding for finding in findings}
    assert len(found) == len(findings), "one for each check"
    assert (found["pause"].level, found["pause"].detail) == ("note", "shard 0, 1, 2: paused")
    assert found["depth"].level == found["consumer group"].level == "ok"
    await redis.close()
