"""Node's BullMQ 5.61, 5.81 and 6.7 beside our worker: repeats of the old kind, odd cron patterns,
flows and limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tenure.core.registry import open_queue
from tests.interop.bullmq.ours import worker
from tests.interop.bullmq.peer import Node
from tests.waiting import until

VERSIONS = {"5.61": 5, "5.81": 581, "6.7": 6}
OPTIONS = {
    "attempts": 3,
    "backoff": {"type": "exponential", "delay": 7},
    "removeOnFail": {"count": 5},
    "removeOnComplete": {"count": 50, "age": 3600},
    "priority": 4,
    "stackTraceLimit": 2,
}
CHANGING = {"timestamp", "delay", "jobId", "prevMillis", "repeatJobKey"}


@pytest.fixture(params=VERSIONS.values(), ids=VERSIONS)
def node(request: pytest.FixtureRequest, nodes: Callable[[int], Node]) -> Node:
    return nodes(request.param)


@pytest.fixture(params=[5, 581], ids=["5.61", "5.81"])
def old(request: pytest.FixtureRequest, nodes: Callable[[int], Node]) -> Node:
    """A BullMQ that has repeatable jobs of the old kind, `queue.add(name, data, {repeat})`."""
    return nodes(request.param)


def iterations(raw: redis.Redis, name: str) -> list[dict[str, Any]]:
    """The completed jobs of a repeat in their order, without what differs from run to run."""
    found = []
    for job_id in sorted(raw.zrange(f"bull:{name}:completed", 0, -1)):
        fields = {
            a.decode(): b.decode()
            for a, b in raw.hgetall(b"bull:%s:%s" % (name.encode(), job_id)).items()
        }
        opts = {
            key: value for key, value in json.loads(fields["opts"]).items() if key not in CHANGING
        }
        found.append(
            {"name": fields["name"], "data": json.loads(fields["data"]), "opts": opts}
            | {"priority": fields["priority"], "atm": fields["atm"]}
        )
    return found


@pytest.mark.clause("B-39")
@pytest.mark.parametrize(
    "repeat", [{"every": 90, "limit": 4}, {"pattern": "* * * * * *", "limit": 3}], ids=str
)
async def test_repeatable_jobs_of_the_old_kind_keep_data_and_options_in_every_run(
    old: Node, name: str, url: str, raw: redis.Redis, repeat: dict[str, Any]
) -> None:
    theirs = f"{name}-node"
    data = {"a": 1, "result": "tick", "text": "h\u00e9", "list": [1, {"b": []}]}
    for queue in (name, theirs):
        added = {**OPTIONS, "repeat": repeat}
        await old.acall(f"queue:{queue}", "add", "report", data, added)
    count = repeat["limit"]
    await old.aask(do="work", queue=theirs, **{"as": theirs})
    async with worker(url):
        for queue in (name, theirs):
            key = f"bull:{queue}:completed"
            await until(lambda key=key: raw.zcard(key) == count, f"{count} runs in {key}")
    await old.aask(do="stop", **{"as": theirs})
    ours = iterations(raw, name)
    assert ours == iterations(raw, theirs), "as Node's own worker makes them"
    for run in ours:
        assert run["data"] == data
        assert run["opts"].items() >= OPTIONS.items()
        assert run["priority"] == "4"
    assert raw.zcard(f"bull:{name}:delayed") == 0, "the limit ends it"


@pytest.mark.clause("B-39")
async def test_node_goes_on_with_a_repeat_that_we_have_continued(
    old: Node, name: str, url: str, raw: redis.Redis
) -> None:
    repeat = {"every": 60, "limit": 6}
    await old.acall(f"queue:{name}", "add", "report", {"n": 1}, {"repeat": repeat, "attempts": 2})
    async with worker(url):
        await until(lambda: raw.zcard(f"bull:{name}:completed") >= 2, "two runs by us")
    await old.aask(do="work", queue=name, **{"as": name})
    await until(lambda: raw.zcard(f"bull:{name}:completed") == 6, "the rest by Node")
    await old.aask(do="stop", **{"as": name})
    runs = iterations(raw, name)
    assert [run["data"] for run in runs] == [{"n": 1}] * 6
    assert {run["opts"]["attempts"] for run in runs} == {2}


@pytest.mark.clause("B-39")
async def test_a_removed_repeat_does_not_come_back(
    old: Node, name: str, url: str, raw: redis.Redis
) -> None:
    repeat = {"every": 3_600_000}
    job = await old.acall(f"queue:{name}", "add", "report", {}, {"repeat": repeat})
    await old.acall(f"job:{name}:{job['id']}", "promote")
    (key,) = [each["key"] for each in await old.acall(f"queue:{name}", "getRepeatableJobs")]
    assert await old.acall(f"queue:{name}", "removeRepeatableByKey", key)
    async with worker(url):
        await until(lambda: raw.zcard(f"bull:{name}:completed") == 1, "the promoted one ran")
    assert raw.zcard(f"bull:{name}:delayed") == 0


@pytest.mark.clause("B-39", "B-40")
async def test_odd_patterns_of_a_scheduler_lead_on_and_what_no_parser_knows_stops_no_job(
    node: Node, name: str, url: str, raw: redis.Redis
) -> None:
    odd = ["0 0 L * *", "* * * *", "0 9 ? * 5L", "@weekly", "15 4 * * MON#2"]
    if node.major == 6:
        odd += ["@weekdays", "@weekends", "H H * * *", "H(0-5)/2 * * * *"]
    for number, pattern in enumerate(odd):
        made = await node.acall(
            f"queue:{name}",
            "upsertJobScheduler",
            f"s{number}",
            {"pattern": pattern},
            {"name": "work"},
        )
        await node.acall(f"job:{name}:{made['id']}", "promote")
    made = await node.acall(
        f"queue:{name}", "upsertJobScheduler", "own", {"pattern": "0 5 * * *"}, {"name": "work"}
    )
    # As a queue with a `repeatStrategy` of its own stores it.
    opts = json.loads(raw.hget(f"bull:{name}:{made['id']}", "opts"))
    opts["repeat"]["pattern"] = "FREQ=WEEKLY;BYDAY=MO"
    raw.hset(f"bull:{name}:{made['id']}", "opts", json.dumps(opts))
    await node.acall(f"job:{name}:{made['id']}", "promote")
    neighbours = [await node.acall(f"queue:{name}", "add", "work", {}) for _ in range(5)]
    wanted = len(odd) + 1 + len(neighbours)
    async with worker(url):
        await until(lambda: raw.zcard(f"bull:{name}:completed") == wanted, "all of them ran")
    follow = {each.decode().split(":")[1] for each in raw.zrange(f"bull:{name}:delayed", 0, -1)}
    assert follow == {f"s{number}" for number in range(len(odd))}


@pytest.mark.clause("B-22")
async def test_a_flow_of_node_runs_through_our_worker(
    node: Node, name: str, url: str, raw: redis.Redis
) -> None:
    children = [
        {"name": "child", "queueName": name, "data": {"result": number}} for number in range(3)
    ]
    flow = {"name": "root", "queueName": name, "data": {"result": "root"}, "children": children}
    tree = await node.acall("flow", "add", flow)
    async with worker(url):
        await until(lambda: raw.zcard(f"bull:{name}:completed") == 4, "the root ran last")
    root = tree["job"]["id"]
    # The set is ordered by milliseconds, in which two jobs may end; the events are in order.
    ended = [
        e[b"jobId"] for _, e in raw.xrange(f"bull:{name}:events") if e[b"event"] == b"completed"
    ]
    assert ended[-1] == root.encode()
    values = await node.acall(f"job:{name}:{root}", "getChildrenValues")
    assert sorted(values.values()) == [0, 1, 2]


@pytest.mark.clause("B-14", "B-15")
async def test_limits_that_node_set_hold_for_our_worker(
    node: Node, name: str, url: str, raw: redis.Redis
) -> None:
    await node.acall(f"queue:{name}", "setGlobalConcurrency", 2)
    for _ in range(6):
        await node.acall(f"queue:{name}", "add", "work", {"ms": 30})
    first, second = open_queue(url, worker_id="a"), open_queue(url, worker_id="b")
    taken = [*await first.claim(10, wait_ms=0), *await second.claim(10, wait_ms=0)]
    assert len(taken) == 2
    await first.close()
    await second.close()
    raw.delete(*(f"bull:{name}:{lease.job_id}:lock" for lease in taken))
    most = 0

    def done() -> bool:
        nonlocal most
        most = max(most, raw.llen(f"bull:{name}:active"))
        return bool(raw.zcard(f"bull:{name}:completed") == 6)

    async with worker(url, concurrency=10):
        await until(done, "all of them ran")
    assert most <= 2


@pytest.mark.clause("B-15")
async def test_a_rate_limit_that_node_set_holds_for_our_worker(
    node: Node, name: str, url: str, raw: redis.Redis
) -> None:
    await node.acall(f"queue:{name}", "setGlobalRateLimit", 3, 60_000)
    for _ in range(6):
        await node.acall(f"queue:{name}", "add", "work", {})
    first, second = open_queue(url, worker_id="a"), open_queue(url, worker_id="b")
    taken = [*await first.claim(10, wait_ms=0), *await second.claim(10, wait_ms=0)]
    assert len(taken) == 3
    raw.delete(f"bull:{name}:limiter")  # a minute later
    assert len(await second.claim(10, wait_ms=0)) == 3
    await first.close()
    await second.close()
