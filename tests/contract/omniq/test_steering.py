"""Administration: retry, remove, children, the monitor."""

from __future__ import annotations

import pytest

from tenure.contracts.omniq import Client, Refused
from tenure.contracts.omniq.monitor import GroupStatus
from tests.contract.omniq.conftest import Bench


async def _failed(bench: Bench, count: int, **options: object) -> list[str]:
    ids = await bench.publish(*[{}] * count, max_attempts=1, **options)
    for _ in range(count):
        job = await bench.reserve()
        await bench.client.ack_fail(bench.name, job.job_id, job.lease_token, error="boom")
    return ids


@pytest.mark.clause("O-25", "O-13")
async def test_a_failed_job_is_sent_back_with_all_its_attempts(bench: Bench) -> None:
    plain, grouped = *await _failed(bench, 1), *await _failed(bench, 1, gid="g")
    assert await bench.client.retry_failed(bench.name, plain) is None
    await bench.client.retry_failed(bench.name, grouped)
    stored = bench.hash(plain)
    assert (stored["state"], stored["attempt"], stored["failed_ms"]) == ("wait", "0", "")
    assert (bench.ids("wait"), bench.ids("g:g:wait")) == ([plain], [grouped])
    assert bench.ids("failed") == []
    assert {(await bench.reserve()).attempt for _ in range(2)} == {1}


@pytest.mark.clause("O-25")
async def test_only_a_failed_job_is_sent_back(bench: Bench) -> None:
    (waiting,) = await bench.publish({})
    for job_id, word in ((waiting, "NOT_FAILED"), ("none", "NO_JOB")):
        with pytest.raises(Refused, match=word) as caught:
            await bench.client.retry_failed(bench.name, job_id)
        assert caught.value.word == word
    answers = await bench.client.retry_failed_batch(bench.name, [waiting, "none"])
    assert [(item.status, item.reason) for item in answers] == [
        ("ERR", "NOT_FAILED"),
        ("ERR", "NO_JOB"),
    ]


@pytest.mark.clause("O-26")
async def test_a_job_is_removed_from_the_lane_where_it_stands(bench: Bench) -> None:
    await bench.publish({}, job_id="done")
    await bench.run_all(1)
    await _failed(bench, 1, job_id="failed")
    await bench.publish({}, job_id="delayed", due_ms=Client.now_ms() + 60_000)
    await bench.publish({}, job_id="grouped", gid="g")
    await bench.publish({}, job_id="waiting")
    lanes = {"completed": "done", "failed": "failed", "delayed": "delayed", "gwait": "grouped"}
    for lane, job_id in [*lanes.items(), ("wait", "waiting")]:
        for other in {"wait", "gwait", "delayed", "failed", "completed"} - {lane}:
            with pytest.raises(Refused, match="LANE_MISMATCH"):
                await bench.client.remove_job(bench.name, job_id, other)  # type: ignore[arg-type]
        await bench.client.remove_job(bench.name, job_id, lane)  # type: ignore[arg-type]
        assert bench.hash(job_id) == {}
        with pytest.raises(Refused, match="NO_JOB"):
            await bench.client.remove_job(bench.name, job_id, lane)  # type: ignore[arg-type]
    assert bench.ids("groups:ready") == []
    assert await bench.client.reserve(bench.name) is None


@pytest.mark.clause("O-26")
async def test_a_running_job_or_an_unknown_lane_is_refused(bench: Bench) -> None:
    (job_id,) = await bench.publish({})
    await bench.reserve()
    with pytest.raises(Refused, match="ACTIVE"):
        await bench.client.remove_job(bench.name, job_id, "wait")
    with pytest.raises(Refused, match="BAD_LANE"):
        await bench.client.remove_job(bench.name, job_id, "somewhere")  # type: ignore[arg-type]
    bench.raw.hset(bench.key("job:lost"), mapping={"id": "lost", "payload": "{}", "state": "wait"})
    with pytest.raises(Refused, match="NOT_IN_LANE"):
        await bench.client.remove_job(bench.name, "lost", "wait")


@pytest.mark.clause("O-26", "O-25", "O-48")
@pytest.mark.parametrize("gid", ["", "g"])
async def test_a_batch_out_of_the_middle_of_a_long_lane_leaves_the_rest_in_order(
    bench: Bench, gid: str
) -> None:
    jobs = [({"n": n}, {"gid": gid, "max_attempts": 1}) for n in range(3_000)]
    ids = await bench.client.publish_many(bench.name, jobs)
    gone = ids[1_000:1_100] + ids[2_900:2_950] + ids[:20]
    lane = "gwait" if gid else "wait"
    answers = await bench.client.remove_jobs_batch(bench.name, lane, [*gone, "none"])
    assert [item.status for item in answers] == ["OK"] * len(gone) + ["ERR"]
    left = [each for each in ids if each not in set(gone)]
    assert bench.ids("g:g:wait" if gid else "wait") == left


@pytest.mark.clause("O-25", "O-48")
async def test_a_batch_out_of_the_middle_of_many_failed_jobs_leaves_the_rest_in_order(
    bench: Bench,
) -> None:
    queue = bench.queue()
    jobs = [({"n": n}, {"max_attempts": 1}) for n in range(1_500)]
    ids = await bench.client.publish_many(bench.name, jobs)
    for _ in range(3):
        leases = await queue.claim(500, wait_ms=0)
        await queue.settle([_bury(lease) for lease in leases])
    back = ids[700:800]
    answers = await bench.client.retry_failed_batch(bench.name, back)
    assert {item.status for item in answers} == {"OK"}
    assert bench.ids("wait") == back
    assert bench.ids("failed") == [each for each in reversed(ids) if each not in set(back)]


def _bury(lease: object) -> object:
    from tenure.core.outcome import Failure, Outcome

    return Outcome(lease, "bury", failure=Failure(code="x", message="y"))  # type: ignore[arg-type]


@pytest.mark.clause("O-48")
async def test_ids_that_cannot_be_found_by_time_are_searched_one_a_call(bench: Bench) -> None:
    """The mirror table has lost its order: each search is long, and no call makes two."""
    ids = await bench.client.publish_many(bench.name, [({}, {}) for _ in range(2_000)])
    bench.raw.zadd(bench.key("idx:wait"), dict.fromkeys(ids, 5))
    some = [ids[1_999], ids[1_500], ids[1_700]]
    bench.raw.config_resetstat()
    answers = await bench.client.remove_jobs_batch(bench.name, "wait", some)
    assert [item.status for item in answers] == ["OK"] * 3
    assert len(bench.ids("wait")) == 1_997


@pytest.mark.clause("O-27")
async def test_each_child_counts_once(bench: Bench) -> None:
    client, key = bench.client, f"parent-{bench.name}"
    assert await client.child_ack(key, "a") == -1
    assert await client.childs_init(key, 3) is None
    with pytest.raises(Refused, match="ALREADY_INIT"):
        await client.childs_init(key, 3)
    assert [await client.child_ack(key, child) for child in ("a", "a", "b", "c")] == [2, 2, 1, 0]
    assert await client.child_ack(key, "c") == -1
    await client.childs_init(key, 1)
    assert await client.child_ack(key, "c") == 0


@pytest.mark.clause("O-27")
async def test_the_last_child_leaves_no_key_behind(bench: Bench) -> None:
    key = f"parent-{bench.name}"
    await bench.client.childs_init(key, 2)
    assert [await bench.client.child_ack(key, child) for child in ("a", "b")] == [1, 0]
    assert list(bench.raw.scan_iter(f"*{key}*", count=1000)) == []


@pytest.mark.clause("O-27")
async def test_the_last_child_hears_that_it_was_the_last_though_the_answer_was_lost(
    bench: Bench,
) -> None:
    key = f"parent-{bench.name}"
    client, lose = await bench.lossy_client()
    await client.childs_init(key, 2)
    lose()
    assert await client.child_ack(key, "a") == 1
    lose()
    assert await client.child_ack(key, "b") == 0
    assert list(bench.raw.scan_iter(f"*{key}*", count=1000)) == []


@pytest.mark.clause("O-27", "O-52")
async def test_a_damaged_counter_is_no_counter_and_can_be_made_anew(bench: Bench) -> None:
    key = f"parent-{bench.name}"
    count, done = f"{{cc:{key}}}:count", f"{{cc:{key}}}:done"
    for wrong in (b"x", b"1.5", b"nan", b"inf", b""):
        bench.raw.set(count, wrong)
        bench.raw.set(done, "x")
        assert await bench.client.child_ack(key, "a") == -1
        bench.raw.delete(count)
    bench.raw.rpush(count, "x")
    assert await bench.client.child_ack(key, "a") == -1
    await bench.client.childs_init(key, 1)
    bench.raw.set(done, "x")
    assert await bench.client.child_ack(key, "a") == 0


@pytest.mark.clause("O-27")
@pytest.mark.parametrize("key", ["", "  ", "a{b", "x" * 129])
async def test_a_counter_that_cannot_be_is_refused(bench: Bench, key: str) -> None:
    with pytest.raises(ValueError, match="counter"):
        await bench.client.childs_init(key, 1)
    with pytest.raises(Refused, match="BAD_EXPECTED"):
        await bench.client.childs_init("fine", 0)


@pytest.mark.clause("O-49")
async def test_the_monitor_tells_what_is_where(bench: Bench) -> None:
    monitor, name = bench.client.monitor, bench.name
    assert (await monitor.stats(name)).waiting_total == 0
    first, second = await bench.publish({"a": 1}, {"a": 2})
    await bench.publish({}, {}, {}, gid="g", group_limit=2)
    await bench.client.pause(name)
    stats = await monitor.stats(name)
    assert (stats.waiting, stats.group_waiting, stats.waiting_total) == (2, 3, 5)
    assert (stats.paused, stats.groups_ready) == (True, 1)
    assert abs(stats.last_enqueue_ms - Client.now_ms()) < 60_000
    await bench.client.resume(name)
    assert name in await monitor.queues()
    assert [each.queue for each in await monitor.stats_many([name])] == [name]
    job = await bench.reserve()
    info = await monitor.job(name, job.job_id)
    assert info is not None
    assert (info.state, info.attempt, info.lease_token) == ("active", 1, job.lease_token)
    assert await monitor.job(name, "none") is None
    page = await monitor.lane_page(name, "wait", limit=2)
    assert [each.job.job_id for each in page] == [first, second]
    assert [each.job.state for each in await monitor.lane_page(name, "active")] == ["active"]
    found = await monitor.find_jobs(name, "wait", [second, "none", job.job_id])
    assert [each.job.job_id for each in found] == [second]
    assert [ready.gid for ready in await monitor.groups_ready(name)] == ["g"]
    (group,) = await monitor.group_status(name, ["g"])
    assert group == GroupStatus(gid="g", inflight=1, limit=2, ready=True, waiting_count=2)


@pytest.mark.clause("O-48")
async def test_a_hundred_out_of_many_are_removed_in_four_passes(bench: Bench) -> None:
    """How long a step takes with a hundred thousand is a figure of the benchmarks."""
    ids = await bench.client.publish_many(bench.name, [({}, {}) for _ in range(10_000)])
    for start in (100, 5_000, 9_800):
        before = bench.raw.info("commandstats")
        some = ids[start : start + 100]
        answers = await bench.client.remove_jobs_batch(bench.name, "wait", some)
        assert {item.status for item in answers} == {"OK"}
        after = bench.raw.info("commandstats")
        assert _calls(after, "evalsha") - _calls(before, "evalsha") == 4
        assert _calls(after, "lrem") - _calls(before, "lrem") == 4
        assert _calls(after, "lpos") == _calls(before, "lpos")


def _calls(stats: dict[str, dict[str, int]], command: str) -> int:
    return stats.get(f"cmdstat_{command}", {}).get("calls", 0)
