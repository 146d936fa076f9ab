"""We add and watch, a Node worker works."""

from __future__ import annotations

from typing import Any

import pytest

from tenure.contracts.bullmq import Flow, open_events, open_producer
from tenure.contracts.bullmq.records import JobFailed
from tests.interop.bullmq.peer import Node

pytestmark = pytest.mark.clause("B-1", "B-3", "B-4", "B-5", "B-6")

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "standard": ({"result": {"n": 1}}, {}, {"n": 1}),
    "priority": ({"result": 2}, {"priority": 5}, 2),
    "delayed": ({"result": 3}, {"delay": 60}, 3),
    "lifo": ({"result": 4}, {"lifo": True}, 4),
    "unicode": ({"result": "žluťoučký 🐎"}, {"job_id": "kůň"}, "žluťoučký 🐎"),
    "retried": ({"do": "flaky", "times": 1, "result": 5}, {"attempts": 3}, 5),
    "backed off": (
        {"do": "flaky", "times": 2, "result": 6},
        {"attempts": 3, "backoff": {"type": "exponential", "delay": 20}},
        6,
    ),
    "counted": ({"result": 7}, {"remove_on_complete": {"count": 5, "age": 60}}, 7),
    "deduplicated": ({"result": 8}, {"deduplication": {"id": "once"}}, 8),
}


@pytest.fixture
async def sides(url: str, node: Node, name: str) -> Any:
    producer, events = open_producer(url), open_events(url)
    await node.aask(do="work", queue=name, as_=name, **{"as": name})
    yield producer, events
    await node.aask(do="stop", **{"as": name})
    await producer.close()
    await events.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.replace(" ", "-"))
async def test_node_completes_what_we_added(sides: Any, node: Node, name: str, case: str) -> None:
    producer, events = sides
    data, options, result = CASES[case]
    job_id = await producer.add("work", data, **options)
    assert await events.finished(job_id, timeout_ms=10_000) == result
    assert await node.acall(f"job:{name}:{job_id}", "getState") == "completed"


async def test_we_hear_why_node_failed_a_job(sides: Any) -> None:
    producer, events = sides
    job_id = await producer.add("work", {"do": "fail", "why": "no ink"}, attempts=2)
    with pytest.raises(JobFailed, match="no ink"):
        await events.finished(job_id, timeout_ms=10_000)


@pytest.mark.clause("B-33")
async def test_many_jobs_added_at_once_are_all_done_by_node(
    sides: Any, node: Node, name: str
) -> None:
    producer, events = sides
    start = await events.last()
    ids = await producer.add_bulk([("work", {"result": n}, {}) for n in range(120)])
    assert len(set(ids)) == 120
    results = {}
    async for event in events.follow(after=start):
        if event.name == "completed":
            results[event.job_id] = event.fields["returnvalue"]
            if len(results) == 120:
                break
    assert [results[each] for each in ids] == list(range(120))


async def test_node_runs_a_flow_that_we_added(sides: Any, node: Node, name: str) -> None:
    producer, events = sides
    children = tuple(Flow(name="leaf", data={"result": n}) for n in range(3))
    root = await producer.add_flow(Flow(name="top", data={"do": "children"}, children=children))
    values = await events.finished(root, timeout_ms=10_000)
    assert sorted(values.values()) == [0, 1, 2]


@pytest.mark.clause("B-40")
async def test_node_runs_a_scheduler_that_we_set_up(sides: Any, node: Node, name: str) -> None:
    producer, events = sides
    start = await events.last()
    await producer.upsert_scheduler("tick", every=60, limit=3, name="work", data={"result": "t"})
    done = 0
    async for event in events.follow(after=start):
        done += event.name == "completed"
        if done == 3:
            break
    assert [each["key"] for each in await node.acall(f"queue:{name}", "getJobSchedulers")] == [
        "tick"
    ]
    assert await producer.remove_scheduler("tick")
    assert await node.acall(f"queue:{name}", "getJobSchedulers") == []
