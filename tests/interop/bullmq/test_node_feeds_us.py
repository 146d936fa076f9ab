"""Node adds and watches, our worker works: every kind of job, seen by Node as its own."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis

from tenure.contracts.bullmq import open_producer
from tenure.core.registry import open_ledger, open_queue
from tests.interop.bullmq.ours import worker
from tests.interop.bullmq.peer import Node, NodeError
from tests.waiting import until

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "standard": ({"result": {"n": 1}}, {}, {"n": 1}),
    "priority": ({"result": 2}, {"priority": 5}, 2),
    "delayed": ({"result": 3}, {"delay": 60}, 3),
    "lifo": ({"result": 4}, {"lifo": True}, 4),
    "unicode": ({"result": "žluťoučký 🐎"}, {"jobId": "kůň"}, "žluťoučký 🐎"),
    "retried": ({"do": "flaky", "times": 1, "result": 5}, {"attempts": 3}, 5),
    "backed off": (
        {"do": "flaky", "times": 2, "result": 6},
        {"attempts": 3, "backoff": {"type": "exponential", "delay": 20}},
        6,
    ),
    "counted": ({"result": 7}, {"removeOnComplete": {"count": 5, "age": 60}}, 7),
    "deduplicated": ({"result": 8}, {"deduplication": {"id": "once"}}, 8),
}


@pytest.mark.clause("B-1", "B-8", "B-19", "B-20")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.replace(" ", "-"))
async def test_a_job_that_node_added_and_we_completed_is_finished_for_node(
    node: Node, name: str, url: str, case: str
) -> None:
    data, options, result = CASES[case]
    await node.aask(do="follow", queue=name)
    async with worker(url):
        job = await node.acall(f"queue:{name}", "add", "work", data, options)
        assert await node.aask(do="until", queue=name, id=job["id"]) == result
    assert await node.acall(f"job:{name}:{job['id']}", "getState") == "completed"
    counts = await node.acall(f"queue:{name}", "getJobCounts")
    assert {state: n for state, n in counts.items() if n} == {"completed": 1}
    seen = [event for event, args, _ in await node.aask(do="seen", queue=name)]
    assert seen[0] == "added"
    assert seen[-2:] == ["completed", "drained"] or seen[-1] == "completed"


@pytest.mark.clause("B-20", "B-21")
async def test_our_failure_shows_its_reason_and_traceback_to_node(
    node: Node, name: str, url: str
) -> None:
    async with worker(url):
        job = await node.acall(
            f"queue:{name}", "add", "work", {"do": "fail", "why": "no ink"}, {"attempts": 2}
        )
        with pytest.raises(NodeError, match="no ink"):
            await node.aask(do="until", queue=name, id=job["id"])
    failed = await node.acall(f"queue:{name}", "getFailed")
    assert [each["id"] for each in failed] == [job["id"]]
    assert failed[0]["attemptsMade"] == 2
    assert "no ink" in failed[0]["failedReason"]
    assert failed[0]["stacktrace"].count("Traceback") == 2


@pytest.mark.clause("B-21")
async def test_a_fatal_error_is_not_tried_again(node: Node, name: str, url: str) -> None:
    async with worker(url):
        options = {"attempts": 5, "backoff": 10}
        job = await node.acall(f"queue:{name}", "add", "work", {"do": "fatal"}, options)
        with pytest.raises(NodeError, match="fatal"):
            await node.aask(do="until", queue=name, id=job["id"])
    assert (await node.acall(f"job:{name}:{job['id']}", "asJSON"))["attemptsMade"] == 1


@pytest.mark.clause("B-30")
@pytest.mark.parametrize("progress", [25, {"scene": 3}, "half", [1, 2]])
async def test_our_progress_reaches_node(node: Node, name: str, url: str, progress: Any) -> None:
    await node.aask(do="follow", queue=name)
    async with worker(url):
        job = await node.acall(f"queue:{name}", "add", "work", {"progress": progress})
        await node.aask(do="until", queue=name, id=job["id"])
    seen = await node.aask(do="seen", queue=name)
    told = [args["data"] for event, args, _ in seen if event == "progress"]
    assert told == [progress]
    assert (await node.acall(f"job:{name}:{job['id']}", "asJSON"))["progress"] == progress


@pytest.mark.clause("B-22", "B-23")
async def test_a_flow_of_three_levels_runs_through_us(node: Node, name: str, server: str) -> None:
    urls = [f"bullmq+{server}?queue={name}{level}" for level in "abc"]
    flow = {
        "name": "top", "queueName": f"{name}a", "data": {"result": "top"},
        "children": [{
            "name": "mid", "queueName": f"{name}b", "data": {"result": "mid"},
            "children": [
                {"name": "leaf", "queueName": f"{name}c", "data": {"result": n}} for n in range(3)
            ],
        }],
    }  # fmt: skip
    async with worker(*urls):
        tree = await node.acall("flow", "add", flow)
        assert await node.aask(do="until", queue=f"{name}a", id=tree["job"]["id"]) == "top"
    middle = tree["children"][0]["job"]["id"]
    values = await node.acall(f"job:{name}b:{middle}", "getChildrenValues")
    assert sorted(values.values()) == [0, 1, 2]


@pytest.mark.clause("B-31")
async def test_our_worker_is_seen_by_node(node: Node, name: str, url: str) -> None:
    async with worker(url, name="painter-1"):

        async def seen() -> Any:
            workers = await node.acall(f"queue:{name}", "getWorkers")
            return [each.get("rawname", each["name"]) for each in workers]

        names = await until(seen, "Node lists our worker")
        assert len(names) == 1
        assert names[0].endswith(":w:painter-1")
        job = await node.acall(f"queue:{name}", "add", "work", {})
        await node.aask(do="until", queue=name, id=job["id"])
        assert await node.acall(f"job:{name}:{job['id']}", "get:processedBy") == "painter-1"


@pytest.mark.clause("B-13")
async def test_an_idle_worker_starts_at_once_and_a_delayed_job_on_time(
    node: Node, name: str, url: str, raw: redis.Redis
) -> None:
    late: list[int] = []
    woken: list[int] = []
    async with worker(url):
        for delay in (0, 30, 120, 250, 0, 75):
            job = await node.acall(f"queue:{name}", "add", "work", {}, {"delay": delay})
            await node.aask(do="until", queue=name, id=job["id"])
            stamps = raw.hmget(f"bull:{name}:{job['id']}", "timestamp", "processedOn")
            waited = int(stamps[1]) - int(stamps[0])
            (late if delay else woken).append(waited - delay)
    assert min(late) >= 0
    assert sorted(late)[len(late) // 2] <= 20, late
    assert min(woken) <= 20, woken


@pytest.mark.clause("B-11")
async def test_the_wait_list_goes_before_priorities_and_equal_ones_keep_their_order(
    node: Node, name: str, url: str
) -> None:
    added = {}
    for key, options in (
        ("p2", {"priority": 2}), ("p1a", {"priority": 1}), ("plain", {}), ("p1b", {"priority": 1}),
        ("lifo", {"lifo": True}),
    ):  # fmt: skip
        job = await node.acall(f"queue:{name}", "add", "work", {}, options)
        added[job["id"]] = key
    queue = open_queue(url, worker_id="w")
    leases = await queue.claim(10, wait_ms=0)
    assert [added[lease.job_id] for lease in leases] == ["lifo", "plain", "p1a", "p1b", "p2"]
    await queue.close()


@pytest.mark.clause("B-14", "B-15")
async def test_limits_of_the_whole_queue_hold_for_us(node: Node, name: str, url: str) -> None:
    for _ in range(6):
        await node.acall(f"queue:{name}", "add", "work", {})
    await node.acall(f"queue:{name}", "setGlobalConcurrency", 2)
    queue = open_queue(url, worker_id="w")
    assert len(await queue.claim(10, wait_ms=0)) == 2
    assert await queue.claim(10, wait_ms=0) == []
    await node.acall(f"queue:{name}", "removeGlobalConcurrency")
    assert len(await queue.claim(1, wait_ms=0)) == 1
    await queue.close()
    limited = open_queue(f"{url}&limit_max=2&limit_ms=300", worker_id="w")
    began = time.monotonic()
    assert len(await limited.claim(10, wait_ms=0)) == 2
    assert await limited.claim(10, wait_ms=0) == []
    assert len(await limited.claim(1, wait_ms=2_000)) == 1
    assert 0.25 < time.monotonic() - began < 1.5
    await limited.close()


@pytest.mark.clause("B-44")
async def test_the_trace_that_node_sent_along_reaches_the_handler(
    node: Node, name: str, url: str
) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    carrier = '{"traceparent":"' + parent + '"}'
    option = {"telemetry": {"metadata": carrier}} if node.major == 5 else {"tm": carrier}
    await node.acall(f"queue:{name}", "add", "work", {}, option)
    producer = open_producer(url)
    await producer.add("work", {}, telemetryMetadata=carrier)
    queue = open_queue(url, worker_id="w")
    leases = await queue.claim(5, wait_ms=100)
    assert parent in [lease.trace for lease in leases]
    await queue.close()
    await producer.close()


@pytest.mark.clause("B-35", "B-38")
async def test_node_steers_jobs_of_ours(node: Node, name: str, url: str) -> None:
    producer, ledger = open_producer(url), open_ledger(url)
    failed = await producer.add("work", {"do": "flaky", "times": 1})
    async with worker(url):
        await until(lambda: _is(ledger, failed, "failed"), "it failed")
        await node.acall(f"job:{name}:{failed}", "retry", "failed")
        await until(lambda: _is(ledger, failed, "completed"), "Node's retry ran it again")
    later = await producer.add("work", {}, delay=60_000)
    await node.acall(f"job:{name}:{later}", "promote")
    assert await node.acall(f"job:{name}:{later}", "getState") == "waiting"
    await node.acall(f"job:{name}:{later}", "remove")
    assert await ledger.get(later) is None
    await producer.close()
    await ledger.close()


async def _is(ledger: Any, job_id: str, state: str) -> bool:
    record = await ledger.get(job_id)
    return record is not None and record.state == state
