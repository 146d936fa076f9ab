"""A queue with shards on a real cluster: on all its nodes, while some of them fail."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time

import msgspec
import pytest

from tenure.cli.doctor import queue_findings
from tenure.contracts.streams.shards import shard_namespaces, shard_of
from tenure.core.errors import ReplyLost, StoreError, StoreUnreachable
from tenure.core.job import NewJob
from tenure.core.lease import Lease
from tenure.core.outcome import Outcome
from tenure.core.registry import open_ledger, open_queue
from tenure.core.seam import Query
from tenure.store.redis.cluster import slot_of
from tenure.store.redis.placement import share_finding
from tests.chaos.verdict import check
from tests.contract.topology.test_workers import Load
from tests.redis_topologies import RedisCluster

pytestmark = [pytest.mark.few, pytest.mark.timeout(240)]

SHARDS = 3


def slots_of(namespace: str) -> list[int]:
    return [slot_of(each) for each in shard_namespaces(namespace, SHARDS)]


@pytest.mark.clause("S-52", "S-55")
async def test_the_jobs_of_one_queue_are_on_all_nodes_and_are_read_as_one(
    cluster: RedisCluster,
) -> None:
    namespace = f"{{{secrets.token_hex(4)}}}:"
    url = f"streams+{cluster.url}?namespace={namespace}&shards={SHARDS}"
    owners = [cluster.owner(slot) for slot in slots_of(namespace)]
    assert len({owner.port for owner in owners}) == SHARDS
    queue, ledger = open_queue(url, worker_id="w1"), open_ledger(url)
    jobs = [
        NewJob(task="work", payload=b"{}", job_id=f"j{n}", idempotency_key=f"k{n}")
        for n in range(60)
    ]
    assert {answer.status for answer in await queue.submit(jobs)} == {"created"}
    assert {answer.status for answer in await queue.submit(jobs)} == {"replayed"}
    leases = []
    while len(leases) < 60:
        leases += await queue.claim(25, wait_ms=1_000)
    verdicts = await queue.settle([Outcome(lease, "complete") for lease in leases])
    assert len(verdicts) == 60
    assert (await ledger.counts()).states["done"] == 60
    found = (await ledger.find(Query(limit=100))).jobs
    assert sorted(job.job_id for job in found) == sorted(job.job_id for job in jobs)
    for owner, shard in zip(owners, range(SHARDS), strict=True):
        key = f"{shard_namespaces(namespace, SHARDS)[shard]}jobs:stats"
        here = sum(shard_of(job.job_id, SHARDS) == shard for job in jobs)
        assert int(owner.admin.hget(key, "done")) == here
    await queue.close()
    await ledger.close()


@pytest.mark.clause("S-54")
async def test_a_node_that_is_down_does_not_keep_the_other_shards_from_being_claimed_from(
    cluster: RedisCluster,
) -> None:
    """Its shard is left alone meanwhile, and its jobs come when it answers again."""
    namespace = f"{{{secrets.token_hex(4)}}}:"
    url = f"streams+{cluster.url}?namespace={namespace}&shards={SHARDS}"
    queue = open_queue(url, worker_id="w1")
    assert await queue.claim(100, wait_ms=0) == []
    ids = [f"j{number}" for number in range(40)]
    await queue.submit([NewJob(task="work", payload=b"{}", job_id=each) for each in ids])
    held: list[Lease] = []
    while len(held) < 20:
        held += await queue.claim(20 - len(held), wait_ms=100)
    owner = cluster.owner(slots_of(namespace)[1])
    owner.kill()
    for lease, answer in zip(held, await queue.extend(held), strict=True):
        assert isinstance(answer, Lease)
        assert (answer is lease) == (shard_of(lease.job_id, SHARDS) == 1)
    claimed = {lease.job_id for lease in held}
    errors: list[StoreError] = []
    there = {job_id for job_id in ids if shard_of(job_id, SHARDS) != 1}
    deadline = time.monotonic() + 60
    while not there <= claimed:
        try:
            claimed |= {lease.job_id for lease in await queue.claim(100, wait_ms=100)}
        except StoreError as error:
            errors.append(error)
        assert time.monotonic() < deadline, errors
    for error in errors:  # of the node; of the others while the cluster has no owner for its slots
        assert isinstance(error, StoreUnreachable | ReplyLost)
    await asyncio.to_thread(owner.start)
    await queue.close()


@pytest.mark.parametrize("fault", ["planned", "killed", "hanging"])
async def test_workers_work_again_in_time_when_a_node_of_their_shards_is_replaced(
    cluster: RedisCluster, fault: str
) -> None:
    load = Load("streams", cluster.url, f"&shards={SHARDS}")
    async with load.running():
        slot = slots_of(f"{{{load.name}}}:")[1]
        primary = cluster.owner(slot)
        if fault == "planned":
            await asyncio.to_thread(cluster.fail_over, slot)
        elif fault == "killed":
            primary.kill()
        else:
            primary.signal(signal.SIGSTOP)
        await load.works_again()
        if fault == "killed":
            await asyncio.to_thread(primary.start)
        elif fault == "hanging":
            primary.signal(signal.SIGCONT)
    events = [
        msgspec.structs.replace(event, queue=str(shard_of(event.job_id, SHARDS)))
        for event in await load.history()
    ]
    verdict = check(events, quiesced=False)
    assert verdict.ok, str(verdict)
    lost = set(load.stored) - {event.job_id for event in events}
    assert fault != "planned" or not lost


async def test_doctor_says_in_which_slot_and_on_which_node_a_queue_is(
    cluster: RedisCluster,
) -> None:
    name = secrets.token_hex(4)
    slot = slot_of(f"{{{name}}}")
    urls = {
        f"streams+{cluster.url}?namespace={{{name}}}:": [slot],
        f"bullmq+{cluster.url}?queue=q&prefix={{{name}}}": [slot],
        f"omniq+{cluster.url}?queue={name}": [slot],
        f"streams+{cluster.url}?namespace={name}:&shards={SHARDS}": slots_of(f"{name}:"),
    }
    for url, slots in urls.items():
        found = {finding.check: finding for finding in await queue_findings(url)}
        for each in slots:
            port = cluster.owner(each).port
            assert f"slot {each} on 127.0.0.1:{port}" in found["placement"].detail
        assert found["placement"].level == "ok"
        assert {"cluster load", "cluster keys"} <= found.keys()


async def test_doctor_warns_of_a_node_with_most_of_the_keys_or_too_many_shards(
    cluster: RedisCluster,
) -> None:
    name = secrets.token_hex(4)
    queue = open_queue(f"streams+{cluster.url}?namespace={{{name}}}:")
    await queue.submit([NewJob(task="work", payload=b"{}") for _ in range(2_000)])
    await queue.close()
    owner = cluster.owner(slot_of(f"{{{name}}}"))
    url = f"streams+{cluster.url}?namespace={name}:&shards={SHARDS}"
    first, second = slots_of(f"{name}:")[:2]
    source = await asyncio.to_thread(cluster.give, second, cluster.owner(first))
    try:
        found = {finding.check: finding for finding in await queue_findings(url)}
    finally:
        await asyncio.to_thread(cluster.give, second, source)
    assert found["cluster keys"].level == "note"
    assert f"127.0.0.1:{owner.port} has most of them" in found["cluster keys"].remedy
    assert found["placement"].level == "note"
    assert "a node has 2 of the 3 shards" in found["placement"].remedy


@pytest.mark.parametrize(
    ("counts", "level"),
    [
        ({"a:1": 700, "b:1": 300}, "ok"),  # of two nodes one may have three quarters
        ({"a:1": 800, "b:1": 200}, "note"),
        ({"a:1": 400, "b:1": 300, "c:1": 300}, "ok"),
        ({"a:1": 60, "b:1": 20, "c:1": 10}, "ok"),  # too few to tell
        ({"a:1": 9_000}, "ok"),  # there is no other node
        ({"a:1": 0, "b:1": 0}, "ok"),
    ],
)
def test_a_node_is_hot_when_it_has_most_of_a_total_that_counts(
    counts: dict[str, int], level: str
) -> None:
    assert share_finding("cluster load", "commands a second", counts, 100).level == level
