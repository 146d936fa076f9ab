"""Heartbeat and acks: the token gates every write, and an ack may be sent again."""

from __future__ import annotations

import pytest

from tenure.contracts.omniq import NotActive, Reserved, TokenMismatch
from tenure.core.errors import LeaseLost, StoreError
from tenure.core.outcome import COMPLETED, Outcome
from tests.contract.omniq.conftest import Bench


@pytest.mark.clause("O-14", "O-41", "O-50")
async def test_a_heartbeat_lasts_the_timeout_from_now_and_is_not_stacked(bench: Bench) -> None:
    await bench.publish({}, timeout_ms=2_000)
    job = await bench.reserve(10_000)
    beat = bench.client.heartbeat
    assert await beat(bench.name, job.job_id, job.lease_token, 10_000) == 12_000
    for now_ms in (10_500, 11_000, 12_000):
        until = await beat(bench.name, job.job_id, job.lease_token, now_ms)
        assert until == now_ms + 2_000
    assert bench.raw.zscore(bench.key("active"), job.job_id) == 14_000
    assert bench.hash(job.job_id)["lock_until_ms"] == "14000"


@pytest.mark.clause("O-41")
async def test_a_heartbeat_never_makes_a_lease_shorter(bench: Bench) -> None:
    await bench.publish({}, timeout_ms=2_000)
    job = await bench.reserve(10_000)
    beat = bench.client.heartbeat
    assert await beat(bench.name, job.job_id, job.lease_token, 9_000) == 12_000


@pytest.mark.clause("O-15", "O-13", "O-19")
async def test_an_ack_completes_the_job(bench: Bench) -> None:
    await bench.publish({}, job_id="j", gid="g", now_ms_override=1_000)
    job = await bench.reserve(2_000)
    assert await bench.client.ack_success(bench.name, "j", job.lease_token, 3_000) is None
    stored = bench.hash("j")
    assert (stored["state"], stored["completed_ms"]) == ("completed", "3000")
    assert (stored["lease_token"], stored["lock_until_ms"]) == ("", "")
    assert bench.ids("completed") == ["j"]
    assert bench.ids("active") == []
    assert not bench.raw.exists(bench.key("g:g:inflight"))


@pytest.mark.clause("O-19")
async def test_the_last_hundred_completed_jobs_are_kept_newest_first(bench: Bench) -> None:
    ids = await bench.client.publish_many(bench.name, [({}, {}) for _ in range(150)])
    assert await bench.run_all(150) == ids
    assert bench.ids("completed") == ids[:49:-1]
    assert bench.hash(ids[49]) == {}
    assert bench.hash(ids[50])["state"] == "completed"


@pytest.mark.clause("O-19", "O-38")
async def test_a_batch_of_more_than_is_kept_leaves_its_last_hundred(bench: Bench) -> None:
    ids = await bench.client.publish_many(bench.name, [({}, {"gid": "g"}) for _ in range(3)])
    ids += await bench.client.publish_many(bench.name, [({}, {}) for _ in range(247)])
    queue = bench.queue()
    leases = await queue.claim(250, wait_ms=0)
    verdicts = await queue.settle([Outcome(lease, "complete", b'"r"') for lease in leases])
    assert verdicts == [COMPLETED] * len(leases) == [COMPLETED] * 248
    order = [lease.job_id for lease in leases]
    assert bench.ids("completed") == order[:-101:-1]
    assert bench.hash(order[0]) == {}
    assert bench.hash(order[-1])["result"] == '"r"'
    assert await queue.settle([Outcome(leases[0], "complete", b'"r"')]) == [COMPLETED]
    events = [event for event in await bench.history() if event.type == "complete"]
    assert len(events) == 248
    assert sorted(order) == sorted([ids[0], *ids[3:]])


@pytest.mark.clause("O-19", "O-30")
async def test_an_old_entry_of_an_id_never_takes_its_new_job_away(bench: Bench) -> None:
    """Another client may publish an id again while it stands in completed."""
    await bench.publish({}, job_id="again")
    await bench.run_all(1)
    bench.raw.hset(bench.key("job:again"), "state", "delayed")
    bench.raw.zadd(bench.key("delayed"), {"again": 1})
    bench.raw.zrem(bench.key("idx:completed"), "again")
    bench.raw.zadd(bench.key("idx:delayed"), {"again": 1})
    bench.raw.hset(bench.key("stats"), "delayed", 1)
    await bench.publish(*[{}] * 120)
    await bench.run_all(120)
    assert bench.hash("again")["state"] == "delayed"


@pytest.mark.clause("O-16", "O-17", "O-20", "O-50")
async def test_a_failed_job_waits_out_its_backoff_until_its_attempts_are_spent(
    bench: Bench,
) -> None:
    await bench.publish({}, job_id="j", max_attempts=2, backoff_ms=500, gid="g")
    fail = bench.client.ack_fail
    first = await bench.reserve(1_000)
    answer = await fail(bench.name, "j", first.lease_token, 2_000, error="boom")
    assert answer == ("RETRY", 2_500)
    stored = bench.hash("j")
    assert (stored["state"], stored["due_ms"], stored["last_error"]) == ("delayed", "2500", "boom")
    assert bench.raw.zscore(bench.key("delayed"), "j") == 2_500
    assert await bench.client.promote_delayed(bench.name, now_ms_override=2_500) == 1
    second = await bench.reserve(3_000)
    assert second.attempt == 2
    assert await fail(bench.name, "j", second.lease_token, 4_000) == ("FAILED", None)
    stored = bench.hash("j")
    assert (stored["state"], stored["failed_ms"], stored["last_error"]) == (
        *("failed", "4000"),
        "boom",
    )
    assert bench.ids("failed") == ["j"]


@pytest.mark.clause("O-20")
async def test_an_error_is_kept_up_to_four_thousand_and_ninety_six_bytes(bench: Bench) -> None:
    await bench.publish({}, max_attempts=1)
    job = await bench.reserve()
    await bench.client.ack_fail(bench.name, job.job_id, job.lease_token, error="ü" * 5_000)
    assert bench.hash(job.job_id)["last_error"] == "ü" * 2_048


@pytest.mark.clause("O-18")
async def test_a_token_that_is_not_the_jobs_is_a_mismatch(bench: Bench) -> None:
    await bench.publish({}, {})
    job = await bench.reserve()
    calls = (bench.client.heartbeat, bench.client.ack_success, bench.client.ack_fail)
    for job_id, token in ((job.job_id, "x"), (job.job_id, ""), ("none", job.lease_token)):
        for call in calls:
            with pytest.raises(TokenMismatch, match="TOKEN_MISMATCH") as caught:
                await call(bench.name, job_id, token)
            assert (caught.value.code, caught.value.job_id) == ("TOKEN_MISMATCH", job_id)
    assert bench.hash(job.job_id)["state"] == "active"


@pytest.mark.clause("O-18")
async def test_a_job_that_is_leased_to_nobody_is_not_active(bench: Bench) -> None:
    await bench.publish({})
    job = await bench.reserve()
    bench.raw.zrem(bench.key("active"), job.job_id)
    for call in (bench.client.heartbeat, bench.client.ack_success, bench.client.ack_fail):
        with pytest.raises(NotActive, match="NOT_ACTIVE") as caught:
            await call(bench.name, job.job_id, job.lease_token)
        assert isinstance(caught.value, LeaseLost)
    bench.raw.zadd(bench.key("active"), {job.job_id: job.lock_until_ms})


@pytest.mark.clause("O-18", "O-32")
async def test_whoever_was_reaped_is_refused_and_the_history_says_so(bench: Bench) -> None:
    await bench.publish({}, timeout_ms=100, backoff_ms=0)
    late = await bench.reserve(1_000)
    assert await bench.client.reap_expired(bench.name, now_ms_override=1_100) == 1
    with pytest.raises(TokenMismatch):
        await bench.client.ack_success(bench.name, late.job_id, late.lease_token)
    await bench.client.promote_delayed(bench.name)
    current = await bench.reserve()
    assert current.job_id == late.job_id
    with pytest.raises(TokenMismatch):
        await bench.client.heartbeat(bench.name, late.job_id, late.lease_token)
    await bench.client.ack_success(bench.name, current.job_id, current.lease_token)
    rejects = [event for event in await bench.history() if event.type == "reject"]
    assert [event.data for event in rejects] == ["settle", "extend"]


@pytest.mark.clause("O-18", "O-35")
@pytest.mark.parametrize("other_client", [False, True])
async def test_a_second_ack_by_the_caller_is_refused(bench: Bench, other_client: bool) -> None:
    await bench.publish({}, {}, max_attempts=1)
    await bench.publish({}, backoff_ms=9_000)
    done, failed, retried = [await bench.reserve() for _ in range(3)]
    first = bench.client
    await first.ack_success(bench.name, done.job_id, done.lease_token)
    assert await first.ack_fail(bench.name, failed.job_id, failed.lease_token) == ("FAILED", None)
    word, _ = await first.ack_fail(bench.name, retried.job_id, retried.lease_token)
    assert word == "RETRY"
    before = {job.job_id: bench.hash(job.job_id) for job in (done, failed, retried)}
    client = bench.another() if other_client else first
    for job in (done, failed, retried):
        for call in (client.ack_success, client.ack_fail, client.heartbeat):
            with pytest.raises((TokenMismatch, NotActive)):
                await call(bench.name, job.job_id, job.lease_token)
    assert {job_id: bench.hash(job_id) for job_id in before} == before


@pytest.mark.clause("O-35", "O-18")
async def test_only_the_lost_request_is_answered_alike_and_not_the_next_one(bench: Bench) -> None:
    await bench.publish({}, {})
    client, lose = await bench.lossy_client()
    for ack in (client.ack_success, client.ack_fail):
        job = await client.reserve(bench.name)
        assert isinstance(job, Reserved)
        lose()
        await ack(bench.name, job.job_id, job.lease_token)
        with pytest.raises(TokenMismatch):
            await ack(bench.name, job.job_id, job.lease_token)


@pytest.mark.clause("O-18", "O-43")
async def test_a_second_ack_by_an_sdk_on_our_scripts_is_refused(bench: Bench) -> None:
    await bench.publish({}, {})
    calls = bench.client._of(bench.name).calls
    for script in ("ack_success", "ack_fail"):
        job = await bench.reserve()
        args = (script, job.job_id, 0, job.lease_token)
        assert (await calls.run(*args))[0] in (b"OK", b"RETRY")
        assert await calls.run(*args) == [b"ERR", b"TOKEN_MISMATCH"]


@pytest.mark.clause("O-35")
async def test_a_lost_answer_to_an_ack_is_found_again_after_the_job_is_gone(bench: Bench) -> None:
    await bench.publish({}, job_id="one")
    queue, lose = await bench.lossy_queue()
    (lease,) = await queue.claim(1, wait_ms=0)
    lose()
    with pytest.raises(StoreError):
        await queue.settle([Outcome(lease, "complete")])
    await bench.publish(*[{}] * 100)
    await bench.run_all(100)
    assert bench.hash("one") == {}
    assert await queue.settle([Outcome(lease, "complete")]) == [COMPLETED]
    (other,) = await queue.settle([Outcome(lease, "bury")])
    assert isinstance(other, LeaseLost)


@pytest.mark.clause("O-35")
async def test_the_client_hears_the_answer_to_a_lost_ack(bench: Bench) -> None:
    await bench.publish({}, backoff_ms=60_000)
    client, lose = await bench.lossy_client()
    job = await client.reserve(bench.name)
    assert isinstance(job, Reserved)
    lose()
    word, due_ms = await client.ack_fail(bench.name, job.job_id, job.lease_token)
    assert (word, due_ms) == ("RETRY", int(bench.hash(job.job_id)["due_ms"]))


@pytest.mark.clause("O-31")
async def test_the_client_gets_what_its_lost_reserve_took(bench: Bench) -> None:
    ids = await bench.publish({}, {})
    client, lose = await bench.lossy_client()
    lose()
    job = await client.reserve(bench.name)
    assert isinstance(job, Reserved)
    assert (job.job_id, job.attempt) == (ids[0], 1)
    assert bench.ids("active") == [ids[0]]


@pytest.mark.clause("O-47")
async def test_an_exponential_backoff_doubles_with_jitter_up_to_its_cap(bench: Bench) -> None:
    await bench.publish(
        {},
        job_id="j",
        max_attempts=9,
        backoff_ms=1_000,
        backoff="exponential",
        backoff_ms_max=5_000,
    )
    now_ms, waits = 1_000_000, []
    for _ in range(5):
        job = await bench.reserve(now_ms)
        word, due_ms = await bench.client.ack_fail(bench.name, "j", job.lease_token, now_ms)
        assert word == "RETRY"
        waits.append(due_ms - now_ms)  # type: ignore[operator]
        now_ms += 10_000
        await bench.client.promote_delayed(bench.name, now_ms_override=now_ms)
    for wait, full in zip(waits, (1_000, 2_000, 4_000, 5_000, 5_000), strict=True):
        assert full / 2 <= wait <= full
