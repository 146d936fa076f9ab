"""The contract with the real worker runtime around it."""

from __future__ import annotations

import asyncio
import json

import pytest

from tenure import NewJob, Worker, task
from tenure.core.outcome import Outcome


def new(job_id: str) -> NewJob:
    return NewJob(task="t", payload=b"{}", job_id=job_id)


@task("echo")
async def echo(job):
    return {"payload": job.payload}


@pytest.mark.clause("S-34")
@pytest.mark.parametrize("payload", ["{not json", "", "\udcff"])
async def test_a_payload_that_does_not_parse_reaches_the_handler_raw(bench, payload):
    """Only a foreign gateway can enqueue one: ours refuses it."""
    fields = {"job_id": "f1", "task": "echo", "payload": payload.encode(errors="surrogateescape")}
    await bench.outside.hset(
        bench.key("job:f1"), mapping={"job_id": "f1", "status": "queued", "ttl_s": "60"}
    )
    await bench.outside.xadd(bench.key("jobs:stream"), fields)
    await Worker([echo], queues=[bench.url()], burst=True).serve()
    job = await bench.job("f1")
    assert job["status"] == "done"
    raw = fields["payload"].decode(errors="replace")
    assert json.loads(job["result"]) == {"payload": {"_raw": raw}}


async def lose(bench, worker: str, count: int, **options: object) -> None:
    """A worker takes so many jobs and dies with them."""
    queue = bench.queue(worker, lease_ms=60, **options)
    taken = []
    while len(taken) < count:
        taken += await queue.claim(10, wait_ms=1000)


@pytest.mark.clause("S-13")
async def test_jobs_that_lost_one_worker_are_claimed_together_again(bench):
    await bench.queue().submit([new(f"j{n}") for n in range(30)])
    await lose(bench, "w0", 30)
    entries = bench.key("jobs:stream"), "workers", "-", "+", 30
    while len(await bench.outside.xpending_range(*entries, idle=60)) < 30:
        await asyncio.sleep(0.005)  # the store's clock decides
    queue, taken = bench.queue("w1", lease_ms=60), []
    while not taken:
        taken = await queue.claim(50, wait_ms=1000)
    assert len(taken) == 30


@pytest.mark.clause("S-13")
async def test_a_worker_runs_one_suspect_at_a_time_beside_its_other_jobs(bench):
    """A suspect has lost two workers: one slot is enough for it, all the others go on."""
    await bench.queue().submit([new(f"s{n}") for n in range(4)])
    for worker in ("w0", "w1"):
        await lose(bench, worker, 4)
    stream = bench.key("jobs:stream")
    while len(await bench.outside.xpending_range(stream, "workers", "-", "+", 9, idle=1500)) < 4:
        await asyncio.sleep(0.05)  # the store's clock decides
    await bench.queue().submit([new(f"n{n}") for n in range(20)])
    queue = bench.queue("w2", lease_ms=1500)
    names = sorted(lease.job_id for lease in await queue.claim(50, wait_ms=0))
    assert sum(name[0] == "s" for name in names) == 1
    assert sum(name[0] == "n" for name in names) == 20
    await bench.queue().submit([new("late")])
    (late,) = await queue.claim(50, wait_ms=0)
    assert late.job_id == "late", "the suspect holds one slot, not the worker"
    other = bench.queue("w3", lease_ms=1500)
    second = []
    while not second:
        second = await other.claim(50, wait_ms=1000)
    assert len(second) == 1, "another worker runs the next suspect meanwhile"
    assert second[0].job_id not in names


@pytest.mark.clause("S-13")
async def test_a_suspect_that_is_settled_makes_room_for_the_next_at_once(bench):
    await bench.queue().submit([new(f"j{n}") for n in range(3)])
    for worker in ("w0", "w1"):
        await lose(bench, worker, 3)
    rival = bench.queue("w2", lease_ms=1500)
    (lease,) = await until_some(rival)
    done = [lease.job_id]
    while len(done) < 3:
        await rival.settle([Outcome(lease, "complete")])
        (lease,) = await rival.claim(10, wait_ms=0)
        done.append(lease.job_id)
    assert sorted(done) == ["j0", "j1", "j2"]


async def until_some(queue) -> list:
    while True:
        if leases := await queue.claim(10, wait_ms=1000):
            return leases


@pytest.mark.clause("S-28")
async def test_a_claim_that_arrives_after_a_later_one_takes_nothing(bench, monkeypatch):
    queue = bench.queue()
    await queue.submit([NewJob(task="t", payload=b"{}", job_id=f"j{n}") for n in range(4)])
    held_back: list[tuple] = []
    real = queue._redis.run

    async def delay(script, keys, args):
        held_back.append((script, keys, args))
        raise ConnectionError("still on its way")

    monkeypatch.setattr(queue._redis, "run", delay)
    with pytest.raises(ConnectionError):
        await queue.claim(2, wait_ms=0)
    monkeypatch.undo()
    assert len(await queue.claim(2, wait_ms=0)) == 2
    state, *_, leases, _ = await real(*held_back[0])
    assert (state, leases) == (b"late", [])
    assert await bench.pending() == 2
