"""Options and endings in which Node has its own way: ours is the same."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tenure.contracts.bullmq import open_producer
from tenure.core.errors import InvalidJob, UsageError
from tests.interop.bullmq.ours import worker
from tests.interop.bullmq.peer import Node, NodeError
from tests.interop.bullmq.test_twin_settings import Twins, twins
from tests.interop.bullmq.twins import differences
from tests.waiting import until

__all__ = ["twins"]

PARENT_WORDS = {"failParentOnFailure": True, "removeDependencyOnFailure": True}


@pytest.mark.clause("B-25")
async def test_no_more_old_jobs_are_removed_at_once_than_the_limit(
    twins: Callable[..., Twins],
) -> None:
    both = twins()
    if both.node.major == 5:
        return  # 5.61 does not know the word
    for n in range(1, 5):
        await both.do([("add", {}), ("claim", None), ("complete", str(n))])
    for side in ("ours", "official"):
        key = f"{side}:{both.queue}:completed"
        both.raw.zadd(key, {str(n): n for n in range(1, 5)})
    keep = {"removeOnComplete": {"age": 60, "limit": 3}}
    await both.do([("add", keep), ("claim", None), ("complete", "5")])
    assert both.raw.zcard(f"ours:{both.queue}:completed") == 2


@pytest.mark.clause("B-1", "B-23")
@pytest.mark.parametrize("options", [{"sizeLimit": 5}, PARENT_WORDS])
async def test_what_node_refuses_to_add_is_refused_in_its_words(
    node: Node, name: str, url: str, options: dict[str, Any]
) -> None:
    producer = open_producer(url)
    with pytest.raises(NodeError) as theirs:
        await node.acall(f"queue:{name}", "add", "work", {"n": 12}, options)
    with pytest.raises(InvalidJob) as ours:
        await producer.add("work", {"n": 12}, **options)
    words = [set(str(error.value).removeprefix("Error: ").split(" ")) for error in (theirs, ours)]
    assert {word.strip(",") for word in words[0]} == {word.strip(",") for word in words[1]}
    await producer.add("work", {"n": 12}, sizeLimit=8)
    await producer.close()


@pytest.mark.clause("B-44")
async def test_the_telemetry_option_is_kept_where_node_reads_it(
    node: Node, name: str, url: str
) -> None:
    producer = open_producer(url)
    telemetry = {"metadata": '{"traceparent":"00-a-b-01"}', "omitContext": True}
    job_id = await producer.add("work", {}, telemetry=telemetry)
    seen = await node.acall(f"job:{name}:{job_id}", "get:opts")
    assert seen["telemetry"] == telemetry
    await producer.close()


@pytest.mark.clause("B-40")
async def test_a_pattern_starts_immediately_where_asked_to(
    node: Node, name: str, url: str, raw: redis.Redis
) -> None:
    producer = open_producer(url)
    repeat = {"pattern": "0 3 1 1 *", "immediately": True}
    made = await node.acall(f"queue:{name}-n", "upsertJobScheduler", "s", repeat, {"name": "s"})
    ours = await producer.upsert_scheduler("s", **repeat)
    options = []
    for queue, job_id in ((f"{name}-n", made["id"]), (name, ours)):
        told = {a.decode(): b for a, b in raw.hgetall(f"bull:{queue}:{job_id}").items()}
        opts = json.loads(told["opts"])
        assert float(told["delay"]) < 2
        assert abs(float(told["timestamp"]) - opts.pop("prevMillis")) < 100
        options.append(opts["repeat"])
    assert options[0] == options[1]
    with pytest.raises(UsageError, match="startDate"):
        await producer.upsert_scheduler("t", startDate=1, **repeat)
    await producer.close()


@pytest.mark.clause("B-8")
async def test_node_reads_the_name_of_our_worker_as_processed_by(
    node: Node, name: str, url: str
) -> None:
    async with worker(f"{url}&name=ada"):
        job = await node.acall(f"queue:{name}", "add", "work", {})
        await node.aask(do="until", queue=name, id=job["id"])
    assert await node.acall(f"job:{name}:{job['id']}", "get:processedBy") == "ada"


@pytest.mark.clause("B-12", "B-20")
async def test_a_retry_stands_behind_what_has_become_due(twins: Callable[..., Twins]) -> None:
    both = twins()
    await both.do([("add", {"attempts": 2}), ("claim", None)])
    await both.do([("add", {"delay": 60_000})])
    now = int(time.time() * 1000)
    for side in ("ours", "official"):
        both.raw.zadd(f"{side}:{both.queue}:delayed", {"2": (now - 5) * 4096})
    await both.do([("fail", "1")])
    assert both.raw.lrange(f"ours:{both.queue}:wait", 0, -1) == [b"1", b"2"]


@pytest.mark.clause("B-22")
@pytest.mark.parametrize("child_ends", [False, True])
async def test_a_completion_that_children_forbid_leaves_its_stack_as_node_does(
    twins: Callable[..., Twins], child_ends: bool
) -> None:
    """Pending children make an attempt fail; a child that failed its parent ends it for good."""
    both = twins()
    options = {"jobId": "mother", "attempts": 3, "removeOnComplete": True, "removeOnFail": 5}
    await both.do([("add", options), ("claim", None)])
    for side, adding in (("official", both.official), ("ours", both.ours)):
        parent = {"id": "mother", "queue": f"{side}:{both.queue}"}
        child = {"jobId": "child", "parent": parent, "failParentOnFailure": True}
        if (added := adding.do("add", child)) is not None:
            await added
    if child_ends:
        await both.do([("claim", None), ("fatal", "child")])
    with pytest.raises(NodeError) as refused:
        both.official.do("complete", "mother")
    name, _, why = str(refused.value).partition(": ")
    both.node.call(f"job:{both.queue}:mother", "fail", why, "token", name == "UnrecoverableError")
    await both.ours.do("complete", "mother")
    assert not differences(both.raw, both.queue)
    stack = json.loads(both.raw.hget(f"ours:{both.queue}:mother", "stacktrace"))
    assert stack == [f"{name}: {why}"]


@pytest.mark.clause("B-19")
@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({}, ""),
        ({"limiter": {"max": 2, "duration": 60_000}}, "&limit_max=2&limit_ms=60000"),
        ({"removeOnComplete": {"count": 1}}, "&keep_completed=1"),
    ],
)
@pytest.mark.parametrize("delayed", [False, True])
async def test_a_queue_is_drained_when_node_says_so(
    node: Node, name: str, url: str, raw: redis.Redis, options: Any, ours: str, delayed: bool
) -> None:
    """Not while a job waits for its time, nor while the rate limiter holds."""
    told: list[int] = []
    for queue in (f"{name}-n", name):
        for n in range(2):
            await node.acall(f"queue:{queue}", "add", "work", {"n": n})
        if delayed:
            await node.acall(f"queue:{queue}", "add", "work", {}, {"delay": 60_000})

        def ended(queue: str = queue) -> bool:
            events = raw.xrange(f"bull:{queue}:events")
            return sum(fields[b"event"] == b"completed" for _, fields in events) == 2

        if queue == name:
            async with worker(f"{url}{ours}", concurrency=1):
                await until(ended)
        else:
            await node.aask(do="work", queue=queue, options=options)
            await until(ended)
            await node.aask(do="stop")
        events = raw.xrange(f"bull:{queue}:events")
        told.append(sum(fields[b"event"] == b"drained" for _, fields in events))
    assert told[0] == told[1]
