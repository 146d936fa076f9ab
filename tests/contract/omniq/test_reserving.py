"""Reserve, groups and lanes: who gets which job, and when."""

from __future__ import annotations

import asyncio
import time

import pytest

from tenure.contracts.omniq import Paused, Reserved
from tenure.core.outcome import Outcome
from tests.contract.omniq.conftest import Bench
from tests.waiting import until


@pytest.mark.clause("O-3", "O-8", "O-13", "O-50")
async def test_a_reserve_leases_one_job(bench: Bench) -> None:
    await bench.publish({"a": 1}, job_id="j", gid="g", timeout_ms=700, now_ms_override=1_000)
    job = await bench.reserve(2_000)
    assert (job.status, job.job_id, job.payload, job.gid) == ("JOB", "j", '{"a":1}', "g")
    assert (job.attempt, job.max_attempts, job.lock_until_ms) == (1, 3, 2_700)
    stored = bench.hash("j")
    assert (stored["state"], stored["attempt"], stored["lock_until_ms"]) == ("active", "1", "2700")
    assert stored["lease_token"] == job.lease_token
    assert (stored["first_started_ms"], stored["last_started_ms"]) == ("2000", "2000")
    assert bench.raw.zscore(bench.key("active"), "j") == 2_700
    assert bench.raw.get(bench.key("g:g:inflight")) == b"1"
    assert await bench.client.reserve(bench.name, 2_000) is None


@pytest.mark.clause("O-3")
async def test_no_two_leases_have_the_same_token(bench: Bench) -> None:
    await bench.client.publish_many(bench.name, [({}, {}) for _ in range(300)])
    tokens = {job.lease_token for job in await bench.client.reserve_many(bench.name, 200)}
    tokens |= {job.lease_token for job in await bench.another().reserve_many(bench.name, 100)}
    assert len(tokens) == 300


@pytest.mark.clause("O-4", "O-6", "O-23", "O-24")
async def test_a_paused_queue_says_so_and_moves_nothing(bench: Bench) -> None:
    running, waiting = await bench.publish({}, {})
    job = await bench.reserve()
    bench.raw.set(bench.key("paused"), "any value")
    assert await bench.client.is_paused(bench.name)
    assert await bench.client.reserve(bench.name) == Paused()
    assert Paused().status == "PAUSED"
    assert bench.ids("wait") == [waiting]
    assert await bench.client.heartbeat(bench.name, job.job_id, job.lease_token)
    await bench.client.ack_success(bench.name, running, job.lease_token)
    assert await bench.client.resume(bench.name) == 1
    assert await bench.client.resume(bench.name) == 0
    assert await bench.client.pause(bench.name) == "OK"
    assert await bench.client.pause(bench.name) == "OK"
    assert await bench.client.resume(bench.name) == 1
    assert not await bench.client.is_paused(bench.name)
    assert (await bench.reserve()).job_id == waiting


@pytest.mark.clause("O-9")
async def test_jobs_of_a_group_run_in_order_of_publishing(bench: Bench) -> None:
    ids = await bench.publish(*[{"n": n} for n in range(6)], gid="g", group_limit=1)
    order = []
    while isinstance(job := await bench.client.reserve(bench.name), Reserved):
        order.append(job.job_id)
        assert await bench.client.reserve(bench.name) is None  # its limit is one
        await bench.client.ack_success(bench.name, job.job_id, job.lease_token)
    assert order == ids


@pytest.mark.clause("O-10")
async def test_the_first_limit_above_zero_stays(bench: Bench) -> None:
    await bench.publish({}, gid="g")
    await bench.publish({}, gid="g", group_limit=2)
    await bench.publish({}, {}, gid="g", group_limit=9)
    assert len(await bench.client.reserve_many(bench.name, 10)) == 2
    assert await bench.client.reserve(bench.name) is None


@pytest.mark.clause("O-11")
async def test_grouped_and_ungrouped_jobs_take_turns(bench: Bench) -> None:
    plain = await bench.publish(*[{}] * 4)
    grouped = await bench.publish(*[{}] * 4, gid="g", group_limit=10)
    order = [(await bench.reserve()).job_id in grouped for _ in range(8)]
    assert order == [True, False] * 4
    assert await bench.client.reserve(bench.name) is None
    assert len(plain) == 4


@pytest.mark.clause("O-11")
async def test_a_batch_takes_half_of_each_lane_while_both_have_work(bench: Bench) -> None:
    plain = set(await bench.publish(*[{}] * 20))
    await bench.publish(*[{}] * 20, gid="g", group_limit=100)
    ids = await bench.reserved_ids(10)
    assert len(plain.intersection(ids)) == 5
    assert len(await bench.reserved_ids(100)) == 30


@pytest.mark.clause("O-11")
async def test_one_group_of_a_thousand_jobs_does_not_starve_ten_of_one(bench: Bench) -> None:
    long = [({}, {"gid": "long", "group_limit": 1_000}) for _ in range(1_000)]
    short = [({}, {"gid": f"short-{n}"}) for n in range(10)]
    await bench.client.publish_many(bench.name, [*long, *short])
    first = [(await bench.reserve()).gid for _ in range(20)]
    assert {f"short-{n}" for n in range(10)} <= set(first)


@pytest.mark.clause("O-11")
async def test_a_batch_goes_round_the_groups(bench: Bench) -> None:
    jobs = [({}, {"gid": f"g{n % 5}", "group_limit": 10}) for n in range(50)]
    await bench.client.publish_many(bench.name, jobs)
    gids = [job.gid for job in await bench.client.reserve_many(bench.name, 10)]
    assert sorted(gids) == sorted(f"g{n}" for n in (0, 1, 2, 3, 4) * 2)


@pytest.mark.clause("O-9", "O-10", "O-11")
async def test_eight_parallel_reservers_keep_order_and_limits(bench: Bench) -> None:
    limits = {f"g{n}": n % 3 + 1 for n in range(12)}
    jobs = [
        ({"gid": gid, "n": n}, {"gid": gid, "group_limit": limit})
        for n in range(25)
        for gid, limit in limits.items()
    ]
    ids = await bench.client.publish_many(bench.name, jobs)
    running: dict[str, int] = dict.fromkeys(limits, 0)
    over: list[str] = []
    started: dict[str, list[str]] = {gid: [] for gid in limits}

    async def work(name: str) -> None:
        queue = bench.queue(name)
        while sum(map(len, started.values())) < len(ids):
            for lease in await queue.claim(3, wait_ms=50):
                started[lease.gid].append(lease.job_id)
                running[lease.gid] += 1
                if running[lease.gid] > limits[lease.gid]:
                    over.append(lease.job_id)
                await asyncio.sleep(0)
                running[lease.gid] -= 1
                await queue.settle([Outcome(lease, "complete")])

    await asyncio.gather(*(work(f"w{n}") for n in range(8)))
    assert not over
    order = {each: n for n, each in enumerate(ids)}
    history = [event for event in await bench.history() if event.type in ("claim", "complete")]
    for gid, limit in limits.items():
        held, most = 0, 0
        claims = [event for event in history if event.gid == gid]
        for event in claims:
            held += 1 if event.type == "claim" else -1
            most = max(most, held)
        assert most <= limit, f"{most} of group {gid} ran at once"
        first = [order[event.job_id] for event in claims if event.type == "claim"]
        assert first == sorted(first), f"group {gid} ran out of order"


@pytest.mark.clause("O-30")
async def test_an_id_without_a_job_is_never_handed_out(bench: Bench) -> None:
    bench.raw.rpush(bench.key("wait"), "ghost")
    bench.raw.rpush(bench.key("g:g:wait"), "ghost-2")
    bench.raw.zadd(bench.key("groups:ready"), {"g": 1})
    bench.raw.hset(bench.key("stats"), "group_waiting", 1)
    (real,) = await bench.publish({"a": 1})
    assert await bench.reserved_ids(10) == [real]
    assert not bench.raw.exists(bench.key("g:g:inflight"))
    assert bench.ids("wait") == []


@pytest.mark.clause("O-30")
async def test_an_id_that_stands_in_its_lane_twice_is_leased_once(bench: Bench) -> None:
    (job_id,) = await bench.publish({"a": 1})
    bench.raw.rpush(bench.key("wait"), job_id, job_id)
    assert await bench.reserved_ids(10) == [job_id]
    assert await bench.client.reserve(bench.name) is None


@pytest.mark.clause("O-31")
async def test_what_a_lost_claim_took_of_a_group_comes_back_in_order(bench: Bench) -> None:
    ids = await bench.publish({}, {}, {}, gid="g", group_limit=2)
    queue = bench.queue()
    lost = await queue.claim(2, wait_ms=0)
    queue._claimer._claims._held.clear()  # as if the answer had never come
    queue._claimer._claims._answer_lost = True
    again = await queue.claim(3, wait_ms=0)
    assert [lease.job_id for lease in again] == [lease.job_id for lease in lost] == ids[:2]
    assert {lease.attempt for lease in again} == {1}


@pytest.mark.clause("O-33")
async def test_time_is_the_servers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000)
    (job_id,) = await bench.publish({}, timeout_ms=1_000)
    job = await bench.reserve()
    seconds, micros = bench.raw.time()
    now_ms = seconds * 1000 + micros // 1000
    assert abs(int(bench.hash(job_id)["created_ms"]) - now_ms) < 30_000
    assert abs(job.lock_until_ms - 1_000 - now_ms) < 30_000
    assert await bench.client.reap_expired(bench.name) == 0


@pytest.mark.clause("O-37")
async def test_an_idle_worker_hears_of_our_publish_at_once(bench: Bench) -> None:
    queue = bench.queue(poll_ms=20_000)  # it would sleep through anything but the bell
    for _ in range(5):
        waiting = asyncio.create_task(queue.claim(1, wait_ms=30_000))
        await until(lambda: _blocked(bench), "the claim listens")
        began = time.monotonic()
        await bench.publish({})
        (lease,) = await waiting
        assert time.monotonic() - began < 10
        await queue.settle([Outcome(lease, "complete")])


def _blocked(bench: Bench) -> bool:
    return bool(bench.raw.info("clients")["blocked_clients"])


@pytest.mark.clause("O-37")
async def test_a_job_that_nobody_rang_for_is_seen_by_looking(bench: Bench) -> None:
    queue = bench.queue()
    waiting = asyncio.create_task(queue.claim(1, wait_ms=10_000))
    await until(lambda: _blocked(bench), "the claim listens")
    assert not waiting.done()
    bench.raw.hset(bench.key("job:x"), mapping=_foreign("x"))
    bench.raw.rpush(bench.key("wait"), "x")
    bench.raw.zadd(bench.key("idx:wait"), {"x": 1})
    began = time.monotonic()
    (lease,) = await waiting
    assert lease.job_id == "x"
    assert time.monotonic() - began < 5


def _foreign(job_id: str) -> dict[str, str]:
    return {
        "id": job_id,
        "payload": "{}",
        "state": "wait",
        "attempt": "0",
        "max_attempts": "3",
        "timeout_ms": "30000",
        "backoff_ms": "5000",
        "created_ms": "1",
    }
