"""Maintenance: what is due, what ran out, what is old, and what others left wrong."""

from __future__ import annotations

import asyncio

import pytest

from tenure.core.lease import Report
from tenure.core.outcome import Failure, Outcome
from tests.contract.omniq.conftest import Bench
from tests.contract.omniq.tables import untrue


@pytest.mark.clause("O-21")
async def test_due_jobs_join_their_own_lanes_in_order(bench: Bench) -> None:
    for n, gid in enumerate(["", "a", "", "a"]):
        await bench.publish({}, job_id=f"j{n}", gid=gid, due_ms=9_000 - n, now_ms_override=1_000)
    assert await bench.client.promote_delayed(bench.name, 3, 9_000) == 3
    assert await bench.client.promote_delayed(bench.name, now_ms_override=9_000) == 1
    assert bench.ids("wait") == ["j2", "j0"]
    assert bench.ids("g:a:wait") == ["j3", "j1"]
    assert bench.ids("groups:ready") == ["a"]
    assert bench.hash("j0")["state"] == "wait"


@pytest.mark.clause("O-21")
async def test_a_thousand_due_jobs_are_promoted_in_short_steps(bench: Bench) -> None:
    jobs = [({}, {"due_ms": 5_000}) for _ in range(1_100)]
    await bench.client.publish_many(bench.name, jobs, now_ms_override=1_000)
    assert await bench.client.promote_delayed(bench.name, now_ms_override=6_000) == 1_000
    assert await bench.client.promote_delayed(bench.name, now_ms_override=6_000) == 100


@pytest.mark.clause("O-22")
async def test_a_lease_that_ran_out_waits_out_its_backoff_or_has_failed(bench: Bench) -> None:
    await bench.publish({}, job_id="again", timeout_ms=100, backoff_ms=700)
    await bench.publish({}, job_id="spent", timeout_ms=100, max_attempts=1)
    stale = [await bench.reserve(1_000), await bench.reserve(1_000)]
    assert await bench.client.reap_expired(bench.name, now_ms_override=1_099) == 0
    assert await bench.client.reap_expired(bench.name, now_ms_override=1_100) == 2
    assert bench.raw.zscore(bench.key("delayed"), "again") == 1_800
    assert bench.ids("failed") == ["spent"]
    assert {bench.hash(job.job_id)["lease_token"] for job in stale} == {""}


@pytest.mark.clause("O-34")
@pytest.mark.parametrize(
    "end", ["complete", "bury", "retry", "release", "snooze", "cancel", "reap"]
)
async def test_a_groups_slot_is_given_back_however_the_lease_ends(bench: Bench, end: str) -> None:
    await bench.publish({}, {}, gid="g", timeout_ms=50, backoff_ms=0)
    queue = bench.queue()
    (lease,) = await queue.claim(5, wait_ms=0)
    if end == "reap":
        await asyncio.sleep(0.06)  # the lease runs out
        assert (await queue.upkeep()).reclaimed == 1
    else:
        failure = Failure(code="x", message="y")
        await queue.settle([Outcome(lease, end, failure=failure, delay_ms=60_000)])  # type: ignore[arg-type]
    assert bench.raw.get(bench.key("g:g:inflight")) in (None, b"0")
    assert bench.ids("groups:ready") == ["g"]
    assert len(await queue.claim(5, wait_ms=0)) == 1


@pytest.mark.clause("O-34")
async def test_idle_groups_leave_only_their_limits_and_those_not_for_ever(bench: Bench) -> None:
    jobs = [({}, {"gid": f"g{n}", "group_limit": 2}) for n in range(50)]
    await bench.client.publish_many(bench.name, jobs)
    await bench.run_all(50)
    left = {key.split(":", 1)[1] for key in bench.all_keys() if ":g:" in key}
    assert left == {f"g:g{n}:limit" for n in range(50)}
    assert 0 < bench.raw.pttl(bench.key("g:g7:limit")) <= 7 * 86_400_000
    await bench.publish({}, gid="g7")
    assert bench.raw.ttl(bench.key("g:g7:limit")) == -1
    assert bench.raw.get(bench.key("g:g7:limit")) == b"2"


@pytest.mark.clause("O-34")
async def test_a_slot_whose_job_was_deleted_by_hand_is_found_again(bench: Bench) -> None:
    first, second = await bench.publish({}, {}, gid="g", timeout_ms=50)
    queue = bench.queue()
    await queue.claim(1, wait_ms=0)
    bench.raw.delete(bench.key(f"job:{first}"))
    await asyncio.sleep(0.06)  # the lease runs out
    await queue.upkeep()
    (lease,) = await queue.claim(1, wait_ms=0)
    assert lease.job_id == second


@pytest.mark.clause("O-34", "O-22")
async def test_reaping_a_lease_without_a_job_gives_its_groups_slot_back(bench: Bench) -> None:
    first, second = await bench.publish({}, {}, gid="g", timeout_ms=50)
    assert (await bench.reserve(1_000)).job_id == first
    bench.raw.delete(bench.key(f"job:{first}"))
    assert await bench.client.reserve(bench.name, 1_100) is None
    assert await bench.client.reap_expired(bench.name, now_ms_override=1_100) == 1
    assert (await bench.reserve(1_100)).job_id == second


@pytest.mark.clause("O-36")
async def test_failed_jobs_are_kept_up_to_a_number(bench: Bench) -> None:
    ids = await bench.publish(*[{}] * 12, max_attempts=1)
    queue = bench.queue(keep_failed=5)
    failure = Failure(code="x", message="y")
    for lease in await queue.claim(12, wait_ms=0):
        await queue.settle([Outcome(lease, "bury", failure=failure)])
    assert bench.ids("failed") == ids[:6:-1]
    assert bench.hash(ids[0]) == {}


@pytest.mark.clause("O-39")
async def test_the_journal_is_trimmed_by_size_and_age(bench: Bench) -> None:
    for n in range(300):
        await bench.publish({"n": n})
    queue = bench.queue(journal_bytes=10000)
    assert (await queue.upkeep()).trimmed > 0
    assert bench.raw.xlen(bench.key("journal")) < 300
    bench.raw.delete(bench.key("upkeep"))
    await asyncio.sleep(0.01)  # all entries are older than that then
    left = bench.raw.xlen(bench.key("journal"))
    assert (await bench.queue(journal_days=0.0000001).upkeep()).trimmed == left > 0
    assert bench.raw.xlen(bench.key("journal")) == 0


@pytest.mark.clause("O-39")
async def test_every_step_is_in_the_journal_with_its_group(bench: Bench) -> None:
    await bench.publish({}, job_id="j", gid="g", max_attempts=1)
    job = await bench.reserve()
    await bench.client.heartbeat(bench.name, "j", job.lease_token)
    await bench.client.ack_fail(bench.name, "j", job.lease_token, error="boom")
    await bench.client.retry_failed(bench.name, "j")
    await bench.client.remove_job(bench.name, "j", "gwait")
    events = await bench.history()
    kinds = [event.type for event in events]
    assert [kind for kind in kinds if kind != "extend"] == [
        *("submit", "claim", "bury", "reopen", "remove"),
    ]
    assert {event.gid for event in events} == {"g"}
    assert {event.queue for event in events} == {bench.name}


@pytest.mark.clause("O-40")
async def test_reports_are_events_between_the_first_and_the_last(bench: Bench) -> None:
    await bench.publish({}, job_id="j")
    queue, ledger = bench.queue(), bench.ledger()
    (lease,) = await queue.claim(1, wait_ms=0)
    await queue.report([Report(lease=lease, type="token", data=b'{"n":1}', progress=b"50")])
    await queue.settle([Outcome(lease, "complete", b'{"r":1}')])
    events = await ledger.events("j")
    assert [event.type for event in events] == ["wait", "token", "completed"]
    assert events[-1].data == b'{"result":{"r":1}}'
    found = await ledger.get("j")
    assert found is not None
    assert (found.progress, found.result) == (b"50", b'{"r":1}')


@pytest.mark.clause("O-51", "O-38")
async def test_tables_that_a_client_without_counters_left_wrong_are_put_right(
    bench: Bench,
) -> None:
    """What OmniQ 1.x does to a queue: it moves jobs and touches neither stats nor idx."""
    ids = await bench.publish(*[{}] * 6)
    grouped = await bench.publish(*[{}] * 4, gid="g")
    raw, key = bench.raw, bench.key
    for job_id in ids[:3]:  # it took three and completed two
        raw.lrem(key("wait"), 1, job_id)
        raw.hset(key(f"job:{job_id}"), mapping={"state": "active", "lease_token": "t"})
        raw.zadd(key("active"), {job_id: 9_999_999_999_999})
    for job_id in ids[:2]:
        raw.zrem(key("active"), job_id)
        raw.hset(key(f"job:{job_id}"), mapping={"state": "completed", "lease_token": ""})
        raw.lpush(key("completed"), job_id)
    raw.lpop(key("g:g:wait"))
    raw.delete(key(f"job:{grouped[0]}"))
    raw.hset(key("job:new"), mapping={"id": "new", "payload": "{}", "state": "wait"})
    raw.rpush(key("wait"), "new")
    assert untrue(raw, bench.name)
    assert await bench.client.repair(bench.name) > 0
    assert not untrue(raw, bench.name)


@pytest.mark.clause("O-51")
async def test_upkeep_notices_that_tables_are_wrong(bench: Bench) -> None:
    (job_id,) = await bench.publish({}, gid="g")
    raw, key = bench.raw, bench.key
    raw.lpop(key("g:g:wait"))  # taken and completed by a client that keeps no counters
    raw.hset(key(f"job:{job_id}"), "state", "completed")
    raw.lpush(key("completed"), job_id)
    raw.zrem(key("groups:ready"), "g")
    await bench.queue().upkeep()
    assert not untrue(raw, bench.name)
