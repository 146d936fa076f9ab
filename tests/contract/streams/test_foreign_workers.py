"""S-7, S-24, S-38: workers that know only the contract's text share the queue with ours."""

from __future__ import annotations

import asyncio
import json

import pytest

from tenure.core.job import NewJob
from tenure.core.outcome import Completed, Outcome

LEASE_MS = 150


def new(job_id: str, **more: object) -> NewJob:
    return NewJob(task="chat", payload=b"{}", job_id=job_id, **more)  # type: ignore[arg-type]


class Foreign:
    """A worker as the contract's text has it: plain commands, no lease, no journal."""

    def __init__(self, bench, name: str = "foreign") -> None:
        self._bench = bench
        self._name = name

    async def take(self) -> tuple[str, str]:
        redis, stream = self._bench.outside, self._bench.key("jobs:stream")
        ((_, ((msg_id, fields),)),) = await redis.xreadgroup(
            "workers", self._name, {stream: ">"}, count=1
        )
        return msg_id, fields["job_id"]

    async def set(self, job_id: str, **fields: str) -> None:
        now = await self._now_ms()
        key = self._bench.key(f"job:{job_id}")
        await self._bench.outside.hset(key, mapping={"updated_ts": str(now), **fields})

    async def event(self, job_id: str, kind: str) -> None:
        fields = {"type": kind, "ts": str(await self._now_ms()), "step": "w", "data": "{}"}
        await self._bench.outside.xadd(self._bench.key(f"job:{job_id}:events"), fields)

    async def ack(self, msg_id: str) -> None:
        await self._bench.outside.xack(self._bench.key("jobs:stream"), "workers", msg_id)

    async def _now_ms(self) -> int:
        seconds, micros = await self._bench.outside.time()
        return seconds * 1000 + micros // 1000


async def claims_until_idle(bench, queue, idle_ms: int) -> list[str]:
    """What a worker of ours is given until the pending entry has been idle for so long."""
    stream, taken = bench.key("jobs:stream"), []
    while not await bench.outside.xpending_range(stream, "workers", "-", "+", 1, idle=idle_ms):
        await queue.upkeep()
        taken += await queue.claim(10, wait_ms=20)
    return [lease.job_id for lease in taken]


@pytest.mark.clause("S-38")
@pytest.mark.parametrize("says_running", [False, True])
async def test_a_foreign_worker_that_only_works_keeps_its_job_for_the_foreign_limit(
    bench, says_running
):
    queue = bench.queue(lease_ms=LEASE_MS, foreign_lease_ms=2_000)
    await queue.upkeep()
    await queue.submit([new("long")])
    worker = Foreign(bench)
    msg_id, job_id = await worker.take()
    if says_running:
        await worker.set(job_id, status="running")
        await worker.event(job_id, "running")
    assert await claims_until_idle(bench, queue, LEASE_MS * 5) == []
    await worker.set(job_id, status="done", result="1")
    await worker.event(job_id, "done")
    await worker.ack(msg_id)
    await queue.upkeep()
    assert await queue.claim(1, wait_ms=0) == []
    assert (await bench.job("long"))["status"] == "done"


@pytest.mark.clause("S-38")
@pytest.mark.parametrize("sign", ["hash", "event"])
async def test_signs_of_life_keep_a_foreign_job_beyond_the_limit(bench, sign):
    queue = bench.queue(lease_ms=LEASE_MS, foreign_lease_ms=400)
    await queue.upkeep()
    await queue.submit([new("long")])
    worker = Foreign(bench)
    _, job_id = await worker.take()
    stream = bench.key("jobs:stream")
    while not await bench.outside.xpending_range(stream, "workers", "-", "+", 1, idle=1_200):
        if sign == "hash":
            await worker.set(job_id, status="running")
        else:
            await worker.event(job_id, "progress")
        await queue.upkeep()
        assert await queue.claim(10, wait_ms=20) == []


@pytest.mark.clause("S-38")
async def test_a_foreign_worker_that_died_loses_its_job_after_the_limit(bench):
    queue = bench.queue(lease_ms=LEASE_MS, foreign_lease_ms=400)
    await queue.upkeep()
    await queue.submit([new("orphan")])
    worker = Foreign(bench)
    _, job_id = await worker.take()
    await worker.set(job_id, status="running")
    leases = []
    async with asyncio.timeout(5):
        while not leases:
            await queue.upkeep()
            leases = await queue.claim(1, wait_ms=50)
    assert await queue.settle([Outcome(leases[0], "complete")]) == [Completed()]
    assert await bench.pending() == 0


@pytest.mark.clause("S-38", "S-12")
async def test_a_worker_of_ours_is_held_to_its_short_lease(bench):
    queue = bench.queue("dead", lease_ms=LEASE_MS)
    await queue.submit([new("lost")])
    await queue.claim(1, wait_ms=0)
    other, leases = bench.queue("w2", lease_ms=LEASE_MS), []
    async with asyncio.timeout(5):
        while not leases:
            await other.upkeep()
            leases = await other.claim(1, wait_ms=50)
    assert leases[0].attempt == 2


@pytest.mark.clause("S-38")
async def test_an_entry_that_was_enqueued_twice_does_not_rob_a_foreign_worker(bench):
    queue = bench.queue(lease_ms=LEASE_MS)
    await queue.upkeep()
    fields = {"status": "queued", "task": "chat", "payload": "{}", "ttl_s": "60"}
    await bench.outside.hset(bench.key("job:twice"), mapping=fields)
    entry = {"job_id": "twice", "task": "chat", "payload": "{}"}
    for _ in range(2):
        await bench.outside.xadd(bench.key("jobs:stream"), entry)
    worker = Foreign(bench)
    _, job_id = await worker.take()
    await worker.set(job_id, status="running")
    assert await queue.claim(10, wait_ms=0) == []


@pytest.mark.clause("S-7")
async def test_a_time_to_live_shorter_than_the_lease_does_not_expire_a_running_job(bench):
    queue = bench.queue(lease_ms=3_000)
    await queue.submit([new("short", ttl_ms=1_000), new("close", ttl_ms=1_000)])
    leases = await queue.claim(2, wait_ms=0)
    keys = [
        bench.key(f"job:{name}{more}") for name in ("short", "close") for more in ("", ":events")
    ]
    assert min([await bench.outside.pttl(key) for key in keys]) > 3_000
    await queue.extend(leases)
    assert min([await bench.outside.pttl(key) for key in keys]) > 3_000
    verdicts = await queue.settle(
        [Outcome(leases[0], "complete", b"1"), Outcome(leases[1], "bury")]
    )
    assert isinstance(verdicts[0], Completed)
    assert max([await bench.outside.pttl(key) for key in keys]) <= 1_000


@pytest.mark.clause("S-24")
async def test_an_idempotency_key_holds_the_job_id_alone(bench):
    queue = bench.queue()
    await queue.submit([new("first", idempotency_key="k")])
    assert await bench.outside.get(bench.key("idempotency:k")) == "first"
    (again,) = await queue.submit([new("second", idempotency_key="k")])
    assert (again.job_id, again.status) == ("first", "replayed")


@pytest.mark.clause("S-24")
async def test_a_key_that_another_gateway_wrote_is_honoured(bench):
    queue = bench.queue()
    fields = {"status": "queued", "task": "plan", "payload": "{}", "ttl_s": "60"}
    await bench.outside.hset(bench.key("job:theirs"), mapping=fields)
    await bench.outside.set(bench.key("idempotency:k"), "theirs", ex=60)
    (answer,) = await queue.submit([new("ours", idempotency_key="k")])
    assert (answer.job_id, answer.status) == ("theirs", "replayed")
    assert await bench.outside.exists(bench.key("job:ours")) == 0


@pytest.mark.clause("S-24")
async def test_a_replay_whose_job_has_expired_makes_a_new_job(bench):
    queue = bench.queue()
    await queue.submit([new("first", idempotency_key="k")])
    await bench.outside.delete(bench.key("job:first"), bench.key("job:first:events"))
    (answer,) = await queue.submit([new("second", idempotency_key="k")])
    assert (answer.job_id, answer.status) == ("second", "created")
    assert await bench.outside.get(bench.key("idempotency:k")) == "second"
    assert json.loads((await bench.job("second"))["payload"]) == {}


@pytest.mark.clause("S-24", "S-36")
async def test_an_idempotency_key_of_another_type_is_moved_away(bench):
    await bench.outside.rpush(bench.key("idempotency:k"), "x")
    (answer,) = await bench.queue().submit([new("first", idempotency_key="k")])
    assert answer.status == "created"
    assert await bench.outside.get(bench.key("idempotency:k")) == "first"


@pytest.mark.clause("S-12", "S-38")
@pytest.mark.parametrize("by", ["claim", "upkeep"])
async def test_a_lost_job_is_found_behind_more_held_entries_than_one_search_reads(bench, by):
    held, redis, stream = 1_200, bench.outside, bench.key("jobs:stream")
    queue = bench.queue(lease_ms=LEASE_MS)
    await queue.upkeep()
    for _ in range(0, held, 300):
        await queue.submit([NewJob(task="chat", payload=b"{}") for _ in range(300)])
    await redis.xreadgroup("workers", "foreign", {stream: ">"}, count=held)
    await queue.submit([new("lost")])
    (lease,) = await queue.claim(1, wait_ms=0)
    other = bench.queue("w2", lease_ms=LEASE_MS)
    async with asyncio.timeout(10):
        while (await bench.job("lost"))["lease"].split()[6] == lease.token:
            if by == "upkeep":
                await other.upkeep()
            else:
                assert len(await other.claim(10, wait_ms=20)) <= 1
    left = await redis.xpending_range(stream, "workers", "-", "+", 2_000, consumername="foreign")
    assert len(left) == held


@pytest.mark.clause("S-36")
@pytest.mark.parametrize("value", ["junk", "+", f"{'9' * 30}-1", "1-" + "9" * 19])
async def test_a_place_in_the_search_that_is_none_does_not_stop_it(bench, value):
    queue = bench.queue(lease_ms=LEASE_MS)
    await queue.submit([new("lost")])
    await queue.claim(1, wait_ms=0)
    other = bench.queue("w2", lease_ms=LEASE_MS)
    fields = {"claim_from": value, "upkeep_from": value}
    await bench.outside.hset(bench.key("jobs:upkeep"), mapping=fields)
    async with asyncio.timeout(10):
        await other.upkeep()
        while not (leases := await other.claim(1, wait_ms=20)):
            pass
    assert leases[0].job_id == "lost"


@pytest.mark.clause("S-6")
@pytest.mark.parametrize(
    ("stored", "ttl_ms"),
    [("", 0), ("7", 7_000), ("soon", 0), ("-1", 0), ("9" * 5_000, 0)],
    ids=["queue's own", "job's own", "text", "negative", "endless"],
)
async def test_a_lease_says_the_time_to_live_that_the_job_itself_was_given(bench, stored, ttl_ms):
    queue = bench.queue()
    await queue.submit([new("a")])
    if stored:
        await bench.outside.hset(bench.key("job:a"), "ttl_s", stored)
    (lease,) = await queue.claim(1, wait_ms=0)
    assert lease.ttl_ms == ttl_ms
