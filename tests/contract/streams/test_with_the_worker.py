"""The contract with the real worker runtime around it."""

from __future__ import annotations

import json

import pytest

from leasehold import NewJob, Worker, task


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


@pytest.mark.clause("S-13")
async def test_a_job_that_has_lost_its_lease_often_is_claimed_alone(bench):
    """If it kills its worker, its neighbours shall not die with it every time."""
    queue = bench.queue("w0", lease_ms=60, lost_max=3)
    await queue.submit([NewJob(task="t", payload=b"{}", job_id=f"j{n}") for n in range(4)])
    taken = await queue.claim(10, wait_ms=0)
    assert len(taken) == 4, "nobody is a suspect yet"
    alone: list[str] = []
    for n in range(1, 5):  # each worker dies with what it was given
        rival = bench.queue(f"w{n}", lease_ms=400, lost_max=3)
        leases = await rival.claim(10, wait_ms=2000)
        assert len(leases) == 1
        alone.append(leases[0].job_id)
        assert await rival.claim(10, wait_ms=0) == [], "and nothing more while it holds that one"
    assert sorted(alone) == ["j0", "j1", "j2", "j3"]


@pytest.mark.clause("S-13")
async def test_a_suspect_that_is_settled_frees_its_worker_at_once(bench):
    from leasehold.core.outcome import Outcome

    queue = bench.queue("w0", lease_ms=60, lost_max=3)
    await queue.submit([NewJob(task="t", payload=b"{}", job_id=f"j{n}") for n in range(2)])
    await queue.claim(10, wait_ms=0)
    rival = bench.queue("w1", lease_ms=60, lost_max=3)
    done: list[str] = []
    while len(done) < 2:
        for lease in await rival.claim(10, wait_ms=1000):
            await rival.settle([Outcome(lease, "complete")])
            done.append(lease.job_id)
    assert sorted(done) == ["j0", "j1"]


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
    state, *_, leases = await real(*held_back[0])
    assert (state, leases) == (b"late", [])
    assert await bench.pending() == 2
