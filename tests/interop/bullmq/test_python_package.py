"""The `bullmq` package for Python adds for us, works for us, and works beside us on one queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis

from tenure.contracts.bullmq import open_producer
from tests.interop.bullmq.ours import worker
from tests.interop.bullmq.python_peer import PythonPackage, installed
from tests.waiting import until

JOBS = 2_000
KILLED_AT = 500
RIVALS = "lease_ms=1000&stalled_max=50&stalled_ms=500"
KINDS: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("plain", {"result": 1}, {}),
    ("named", {"result": 2}, {"jobId": "order-17"}),
    ("urgent", {"result": 3}, {"priority": 2}),
    ("late", {"result": 4}, {"delay": 300}),
    ("last in", {"result": 5}, {"lifo": True}),
    ("flaky", {"do": "flaky", "times": 1, "result": 6}, {"attempts": 2}),
    (
        "patient",
        {"do": "flaky", "times": 2, "result": 7},
        {"attempts": 3, "backoff": {"type": "exponential", "delay": 50}},
    ),
    ("hopeless", {"do": "flaky", "times": 9, "why": "no ink left"}, {"attempts": 2}),
    ("Grüße, 世界", {"result": "ж"}, {}),
)
RESULTS = [1, 2, 3, 4, 5, 6, 7, None, "ж"]


@pytest.fixture(scope="session")
def python() -> Path:
    return installed()


@pytest.fixture
def package(python: Path, port: int, name: str) -> PythonPackage:
    return PythonPackage(python, port, name)


async def _all_ended(raw: redis.Redis, name: str) -> None:
    prefix = f"bull:{name}"

    def ended() -> bool:
        done = raw.zcard(f"{prefix}:completed") == len(KINDS) - 1
        return bool(done and raw.zcard(f"{prefix}:failed") == 1)

    await until(ended, "all but the hopeless one are done", within_s=30)


def _ends(raw: redis.Redis, name: str) -> Counter[bytes]:
    """How often each job was completed, by the events that both sides emit."""
    events = raw.xrange(f"bull:{name}:events")
    return Counter(f[b"jobId"] for _, f in events if f[b"event"] == b"completed")


def _check_seen(seen: list[dict[str, Any]]) -> None:
    assert [told["returnvalue"] for told in seen] == RESULTS
    states = ["failed" if result is None else "completed" for result in RESULTS]
    assert [told["state"] for told in seen] == states
    assert [told["attemptsMade"] for told in seen] == [1, 1, 1, 1, 1, 2, 3, 2, 1]
    assert seen[7]["failedReason"] == "no ink left"


@pytest.mark.clause("B-1", "B-19", "B-20", "B-21")
async def test_what_the_python_package_adds_is_done_by_us_and_read_by_it(
    package: PythonPackage, name: str, url: str, raw: redis.Redis
) -> None:
    ids = await package.add(*KINDS)
    assert ids[1] == "order-17"
    async with worker(url):
        await _all_ended(raw, name)
    _check_seen(await package.see(ids))
    assert set(_ends(raw, name).values()) == {1}


@pytest.mark.clause("B-1", "B-4", "B-5")
async def test_what_we_add_is_done_by_the_python_package(
    package: PythonPackage, name: str, url: str, raw: redis.Redis
) -> None:
    producer = open_producer(url)
    ids = await producer.add_bulk(KINDS)
    await producer.close()
    rival = await package.work()
    try:
        await _all_ended(raw, name)
    finally:
        rival.terminate()
        await asyncio.wait_for(rival.communicate(), 30)
    _check_seen(await package.see(ids))


@pytest.mark.timeout(180)
@pytest.mark.clause("B-8", "B-18", "B-28")
async def test_the_python_package_and_we_share_a_queue_and_every_job_ends_once(
    package: PythonPackage, name: str, url: str, raw: redis.Redis
) -> None:
    producer = open_producer(url)
    await producer.add_bulk([("work", {"ms": 10, "result": n}, {}) for n in range(JOBS)])
    await producer.close()
    raw.hset(f"bull:{name}:meta", "opts.maxLenEvents", 10 * JOBS)
    done = f"bull:{name}:completed"
    rival = await package.work()
    try:
        async with worker(f"{url}&{RIVALS}", concurrency=5, name="ours"):
            await until(lambda: raw.zcard(done) >= KILLED_AT, "some are done", within_s=60)
            await until(lambda: _held_by_rival(raw, name), "the rival holds jobs")
            rival.kill()
            await rival.communicate()
            rival = await package.work()
            await until(lambda: raw.zcard(done) == JOBS, "all are done", within_s=90)
    finally:
        rival.terminate()
        await asyncio.wait_for(rival.communicate(), 30)
    ends = _ends(raw, name)
    assert len(ends) == JOBS
    assert set(ends.values()) == {1}
    assert raw.llen(f"bull:{name}:active") == raw.llen(f"bull:{name}:wait") == 0
    assert raw.zcard(f"bull:{name}:failed") == raw.zcard(f"bull:{name}:delayed") == 0
    by_us = Counter(raw.hget(f"bull:{name}:{n + 1}", "pb") for n in range(JOBS))
    assert by_us[b"ours"] > 50, "we did nothing"
    assert JOBS - by_us[b"ours"] > 50, "the package did nothing"
    lost = [raw.hget(f"bull:{name}:{n + 1}", "stc") for n in range(JOBS)]
    assert any(lost), "the kill hit nothing"


def _held_by_rival(raw: redis.Redis, name: str) -> bool:
    running = raw.lrange(f"bull:{name}:active", 0, -1)
    holders = [raw.hget(f"bull:{name}:{job_id.decode()}", "workerId") for job_id in running]
    return sum(holder is None for holder in holders) >= 5
