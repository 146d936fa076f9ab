"""Parents and children: what the end of a child does to its parent, by Node and by us."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tenure.contracts.bullmq import Flow
from tests.interop.bullmq.peer import Node
from tests.interop.bullmq.twins import OfficialSide, OurSide, differences

pytestmark = pytest.mark.clause("B-22", "B-23")
_unique = itertools.count(1)

POLICIES = [
    "failParentOnFailure",
    "continueParentOnFailure",
    "ignoreDependencyOnFailure",
    "removeDependencyOnFailure",
    None,
]


class Twins:
    """A flow of three levels in three queues, on both sides."""

    def __init__(self, node: Node, server: str, raw: redis.Redis) -> None:
        number = next(_unique)
        self.queues = [f"{level}{node.major}-{number}" for level in ("top", "mid", "leaf")]
        self.node, self.raw = node, raw
        self.official = {queue: OfficialSide(node, queue, raw) for queue in self.queues}
        self.ours = {queue: OurSide(server, queue, raw) for queue in self.queues}

    async def add(self, **leaf: Any) -> None:
        """top waits for mid, mid for two leaves; `leaf` are the options of the first leaf."""
        top, mid, low = self.queues
        official = {
            "name": "top", "queueName": top, "opts": {"jobId": "top", "priority": 2},
            "children": [{
                "name": "mid", "queueName": mid, "opts": {"jobId": "mid", **leaf},
                "children": [
                    {
                        "name": "a", "queueName": low, "data": {"n": 1},
                        "opts": {"jobId": "a", **leaf},
                    },
                    {"name": "b", "queueName": low, "data": {"n": 2}, "opts": {"jobId": "b"}},
                ],
            }],
        }  # fmt: skip
        self.node.call("flow", "add", official)
        leaves = (
            Flow(name="a", queue=low, data={"n": 1}, options={"jobId": "a", **leaf}),
            Flow(name="b", queue=low, data={"n": 2}, options={"jobId": "b"}),
        )
        middle = Flow(name="mid", queue=mid, options={"jobId": "mid", **leaf}, children=leaves)
        options = {"jobId": "top", "priority": 2}
        producer = self.ours[top]._producer
        await producer.add_flow(Flow(name="top", queue=top, options=options, children=(middle,)))
        self.compare("add")

    async def do(self, level: int, verb: str, arg: Any = True) -> None:
        queue = self.queues[level]
        self.official[queue].do(verb, arg)
        await self.ours[queue].do(verb, arg)
        self.compare(f"{verb} {arg} in {queue}")

    async def add_child(self, **options: Any) -> None:
        """Give "mother" of the first queue a child in the last one."""
        top, _, low = self.queues
        asked = {"jobId": "child", **options}
        mother = {"id": "mother", "queue": f"official:{top}"}
        self.official[low].do("add", {**asked, "parent": mother})
        await self.ours[low].do("add", {**asked, "parent": {**mother, "queue": f"ours:{top}"}})
        self.compare("add child")

    def compare(self, what: str) -> None:
        for queue in self.queues:
            different = differences(self.raw, queue)
            assert not different, f"{queue} after {what}"

    async def close(self) -> None:
        for side in self.ours.values():
            await side.close()


@pytest.fixture(params=[5, 6], ids=["bullmq5", "bullmq6"])
async def twins(
    request: pytest.FixtureRequest,
    nodes: Callable[[int, str], Node],
    server: str,
    raw: redis.Redis,
) -> Any:
    twins = Twins(nodes(request.param, "official"), server, raw)
    yield twins
    await twins.close()


async def test_children_that_complete_release_their_parents(twins: Twins) -> None:
    await twins.add()
    for job_id in ("a", "b"):
        await twins.do(2, "claim")
        await twins.do(2, "complete", job_id)
    await twins.do(1, "claim")
    await twins.do(1, "complete", "mid")
    await twins.do(0, "claim")
    await twins.do(0, "complete", "top")


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_child_that_fails_does_to_its_parent_what_its_options_say(
    twins: Twins, policy: str | None
) -> None:
    await twins.add(**({policy: True} if policy else {}))
    await twins.do(2, "claim")
    await twins.do(2, "fatal", "a")
    await twins.do(2, "claim")
    await twins.do(2, "complete", "b")


async def test_a_child_that_is_removed_is_no_longer_waited_for(twins: Twins) -> None:
    await twins.add()
    await twins.do(2, "remove", "a")
    await twins.do(2, "remove", "b")


@pytest.mark.clause("B-17")
async def test_a_parent_failed_by_its_child_fails_at_pickup_and_fails_its_own_parent(
    twins: Twins,
) -> None:
    await twins.add(failParentOnFailure=True)
    await twins.do(2, "claim")
    await twins.do(2, "fatal", "a")
    await twins.do(1, "claim")
    reason = twins.raw.hget(f"ours:{twins.queues[1]}:mid", "failedReason")
    assert reason == f"child ours:{twins.queues[2]}:a failed".encode()
    assert twins.raw.zscore(f"ours:{twins.queues[1]}:failed", "mid")
    await twins.do(0, "claim")
    assert twins.raw.zscore(f"ours:{twins.queues[0]}:failed", "top")


@pytest.mark.clause("B-17")
@pytest.mark.parametrize("options", [{}, {"priority": 3}, {"delay": 60_000}])
async def test_a_child_fails_a_parent_that_waits_in_whatever_line_at_once(
    twins: Twins, options: dict[str, Any]
) -> None:
    """The parent does not wait for its time, and its handler does not run."""
    top, low = twins.queues[0], twins.queues[2]
    await twins.do(0, "add", {"jobId": "mother", **options})
    await twins.add_child(failParentOnFailure=True)
    await twins.do(2, "claim")
    await twins.do(2, "fatal", "child")
    await twins.do(0, "claim")
    assert twins.raw.zscore(f"ours:{top}:failed", "mother")
    reason = twins.raw.hget(f"ours:{top}:mother", "failedReason")
    assert reason == f"child ours:{low}:child failed".encode()


@pytest.mark.clause("B-17")
async def test_a_child_that_fails_its_running_parent_lets_it_run_no_more(twins: Twins) -> None:
    top = twins.queues[0]
    await twins.do(0, "add", {"jobId": "mother", "attempts": 3})
    await twins.do(0, "claim")
    await twins.add_child(failParentOnFailure=True)
    await twins.do(2, "claim")
    await twins.do(2, "fatal", "child")
    await twins.do(0, "fail", "mother")
    await twins.do(0, "claim")
    assert twins.raw.zscore(f"ours:{top}:failed", "mother")
