"""What we ask of a queue as a whole, Node answers alike; what we change there, Node sees."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from tenure import Job, task
from tenure.contracts.bullmq import open_producer
from tenure.contracts.bullmq.ledger import BullmqLedger
from tenure.core.registry import open_ledger
from tests.interop.bullmq.ours import worker
from tests.interop.bullmq.peer import Node, NodeError
from tests.waiting import until

pytestmark = pytest.mark.clause("B-57")


@pytest.fixture
async def ledger(url: str) -> Any:
    made = open_ledger(url)
    assert isinstance(made, BullmqLedger)
    yield made
    await made.close()


@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize(("start", "end"), [(0, -1), (1, 2), (2, -1)])
async def test_ranges_of_jobs_are_those_of_node(
    node: Node, name: str, ledger: BullmqLedger, start: int, end: int, ascending: bool
) -> None:
    for n in range(5):
        await node.acall(f"queue:{name}", "add", "work", {"n": n})
        await node.acall(f"queue:{name}", "add", "work", {}, {"delay": 60_000 + n})
        await node.acall(f"queue:{name}", "add", "work", {}, {"priority": 1 + n % 2})
    for ours, theirs in (
        ("waiting", "wait"),
        ("delayed", "delayed"),
        ("prioritized", "prioritized"),
    ):
        got = await ledger.jobs(ours, start=start, end=end, ascending=ascending)
        wanted = await node.acall(f"queue:{name}", "getJobs", [theirs], start, end, ascending)
        assert [job.job_id for job in got] == [job["id"] for job in wanted]


async def test_schedulers_are_listed_as_node_lists_them(
    node: Node, name: str, url: str, ledger: BullmqLedger
) -> None:
    producer = open_producer(url)
    await producer.upsert_scheduler("ours", every=60_000, data={"a": 1})
    template = {"name": "report", "data": {"b": 2}, "opts": {"attempts": 2, "keepLogs": 3}}
    repeat = {"pattern": "0 3 1 1 *", "tz": "Europe/Berlin", "limit": 7}
    await node.acall(f"queue:{name}", "upsertJobScheduler", "theirs", repeat, template)
    wanted = await node.acall(f"queue:{name}", "getJobSchedulers", 0, -1, True)
    got = await ledger.schedulers()
    assert [each.scheduler_id for each in got] == [each["key"] for each in wanted]
    assert [each.next_ms for each in got] == [each["next"] for each in wanted]
    assert got[1].options == wanted[1]["template"]["opts"]
    assert got[1].data == wanted[1]["template"]["data"]
    assert (got[1].limit, got[1].tz, got[1].name) == (7, "Europe/Berlin", "report")
    await producer.close()


async def test_metrics_are_those_of_node(
    node: Node, name: str, url: str, ledger: BullmqLedger, raw: redis.Redis
) -> None:
    async with worker(f"{url}&metrics_minutes=60"):
        for _ in range(3):
            await node.acall(f"queue:{name}", "add", "work", {})
        await until(lambda: raw.zcard(f"bull:{name}:completed") == 3)
    raw.rpush(f"bull:{name}:metrics:completed:data", 5, 8)
    wanted = await node.acall(f"queue:{name}", "getMetrics", "completed", 0, -1)
    got = await ledger.metrics()
    assert got.points == [int(each) for each in wanted["data"]]
    assert (got.count, got.length) == (wanted["meta"]["count"], wanted["count"])


async def test_node_finds_nothing_in_a_queue_that_we_obliterated(
    node: Node, name: str, url: str, ledger: BullmqLedger, raw: redis.Redis
) -> None:
    await node.acall(f"queue:{name}", "add", "work", {}, {"deduplication": {"id": "one"}})
    await node.acall(f"queue:{name}", "add", "work", {}, {"delay": 60_000})
    await ledger.obliterate()
    counts = await node.acall(f"queue:{name}", "getJobCounts")
    assert not any(counts.values())
    left = {each.decode() for each in raw.scan_iter(f"bull:{name}:*")}
    assert left <= {f"bull:{name}:tenure:journal"}
    job = await node.acall(f"queue:{name}", "add", "work", {}, {"deduplication": {"id": "one"}})
    async with worker(url):
        await node.aask(do="until", queue=name, id=job["id"])


@pytest.mark.clause("B-56")
async def test_node_reads_the_data_that_our_handler_left(node: Node, name: str, url: str) -> None:
    @task("*")
    async def handler(job: Job) -> Any:
        await job.update_data({"seen": [job.payload, job.opts["attempts"]]})
        return "ok"

    async with worker(url, handler=handler):
        job = await node.acall(f"queue:{name}", "add", "work", {"n": 1}, {"attempts": 4})
        await node.aask(do="until", queue=name, id=job["id"])
    data = await node.acall(f"job:{name}:{job['id']}", "get:data")
    assert data == {"seen": [{"n": 1}, 4]}


@pytest.mark.clause("B-58")
async def test_a_job_of_node_with_a_backoff_of_its_own_asks_our_task(
    node: Node, name: str, url: str
) -> None:
    @task("*", backoff=lambda made, kind, error, job: made * 10 if kind == "gently" else -1)
    async def handler(job: Job) -> str:
        await asyncio.sleep(0)
        if job.attempt < 3:
            raise RuntimeError("not yet")
        return "at last"

    async with worker(url, handler=handler):
        options = {"attempts": 5, "backoff": {"type": "gently"}}
        job = await node.acall(f"queue:{name}", "add", "work", {}, options)
        assert await node.aask(do="until", queue=name, id=job["id"]) == "at last"
        options = {"attempts": 5, "backoff": {"type": "rudely"}}
        job = await node.acall(f"queue:{name}", "add", "work", {}, options)
        with pytest.raises(NodeError, match="not yet"):
            await node.aask(do="until", queue=name, id=job["id"])
