"""Trees of jobs under random steps: what a child's end, a removal or a retry does to its family."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tenure.contracts.bullmq import Flow
from tests.interop.bullmq.peer import Node, NodeError
from tests.interop.bullmq.twins import OfficialSide, OurSide, differences

_unique = itertools.count(1)
EXAMPLES = int(os.environ.get("TWIN_EXAMPLES", "40"))

OPTIONS = st.sampled_from(
    [
        {},
        {},
        {"priority": 2},
        {"delay": 60_000},
        {"failParentOnFailure": True},
        {"continueParentOnFailure": True},
        {"ignoreDependencyOnFailure": True},
        {"removeDependencyOnFailure": True},
        {"attempts": 2, "failParentOnFailure": True},
        {"removeOnComplete": True, "removeOnFail": True},
        {"removeOnComplete": 1, "failParentOnFailure": True},
    ]
)
QUEUE = st.integers(0, 1)
TREES = st.recursive(
    st.tuples(QUEUE, OPTIONS, st.just(())),
    lambda inner: st.tuples(QUEUE, OPTIONS, st.lists(inner, min_size=1, max_size=3)),
    max_leaves=5,
)
NUMBER = st.integers(0, 7)
STEPS = st.one_of(
    st.tuples(st.just("flow"), QUEUE, TREES),
    st.tuples(st.just("claim"), QUEUE, st.none()),
    st.tuples(st.just("claim"), QUEUE, st.none()),
    *(
        st.tuples(st.just(verb), QUEUE, NUMBER)
        for verb in (
            *("complete", "complete", "fail", "fatal", "fatal", "child", "remove", "again"),
            *("promote", "release", "stall"),
        )
    ),
    st.tuples(st.just("drain"), QUEUE, st.sampled_from(["waiting", "all"])),
    st.tuples(st.just("retry-all"), QUEUE, st.sampled_from(["failed", "completed"])),
    st.tuples(
        st.just("clean"),
        QUEUE,
        st.tuples(
            st.sampled_from(["completed", "failed", "wait", "delayed", "prioritized"]),
            st.just(0),
            st.sampled_from([0, 1, 2]),
        ),
    ),
)


class Families:
    """Two queues on both sides, and the flows that grow in them."""

    def __init__(self, node: Node, server: str, raw: redis.Redis) -> None:
        number = next(_unique)
        self.queues = [f"kin{node.major}-{number}-{side}" for side in "ab"]
        self.node, self.raw = node, raw
        self.official = [OfficialSide(node, queue, raw) for queue in self.queues]
        self.ours = [OurSide(server, queue, raw) for queue in self.queues]
        self._ids = itertools.count(1)

    def _trees(self, tree: Any) -> tuple[dict[str, Any], Flow]:
        at, options, inner = tree
        job_id = f"j{next(self._ids)}"
        opts = {"jobId": job_id, **options}
        both = [self._trees(child) for child in inner]
        official = {
            "name": "work", "queueName": self.queues[at], "data": {"n": 1}, "opts": opts,
            "children": [theirs for theirs, _ in both],
        }  # fmt: skip
        children = tuple(mine for _, mine in both)
        ours = Flow(
            name="work", queue=self.queues[at], data={"n": 1}, options=opts, children=children
        )
        return official, ours

    async def flow(self, tree: Any) -> None:
        official, ours = self._trees(tree)
        self.node.call("flow", "add", official)
        await self.ours[0]._producer.add_flow(ours)

    async def child(self, at: int, parent: str) -> None:
        """A running job gets a child in the same queue."""
        job_id = f"j{next(self._ids)}"
        mother = {"id": parent, "queue": f"official:{self.queues[at]}"}
        opts = {"jobId": job_id, **({"failParentOnFailure": True} if int(job_id[1:]) % 2 else {})}
        self.official[at].do("add", {**opts, "parent": mother})
        flow = Flow(name="work", data={"n": 1}, options=opts)
        await self.ours[at]._producer.add_children(parent, [flow])

    def subject(self, verb: str, at: int, number: int) -> str | None:
        """The job that a step is about, or None when there is none."""
        start = f"official:{self.queues[at]}:"
        held = self.official[at].held
        sets = {"again": ("failed",), "promote": ("delayed",)}
        sets["remove"] = ("failed", "delayed", "completed", "prioritized", "waiting-children")
        if verb in sets:
            found = [self.raw.zrange(start + key, 0, -1) for key in sets[verb]]
            ids = [each.decode() for ids in found for each in ids]
            if verb == "remove":
                ids += [each.decode() for each in self.raw.lrange(start + "wait", 0, -1)]
            return sorted(ids)[number % len(ids)] if ids else None
        return held[number % len(held)] if held else None

    def may(self, verb: str, at: int, arg: Any, target: Any, major: int) -> bool:
        """Whether Node would take the step at all."""
        if isinstance(arg, int) and target is None:
            return False
        if verb == "complete":  # not while children are pending or have failed the parent
            key = f"official:{self.queues[at]}:{target}"
            return not self.raw.exists(f"{key}:dependencies", f"{key}:unsuccessful")
        if verb in (
            "again",
            "retry-all",
        ):  # 5.x loses its priority, and its parent goes on without it
            return major > 5
        return verb != "remove" or not self.runs(at, target)

    async def take(self, verb: str, at: int, target: Any) -> None:
        """One step on both sides."""
        if verb == "flow":
            return await self.flow(target)
        if verb == "child":
            return await self.child(at, target)
        self.official[at].do(verb, target)
        await self.ours[at].do(verb, target)
        if verb in ("complete", "fail", "fatal", "release", "stall"):
            self.official[at].held.remove(target)
            self.ours[at].held.pop(target, None)
        return None

    def runs(self, at: int, job_id: str) -> bool:
        """Whether the job or one of its children, or theirs, is locked."""
        keys = [f"official:{self.queues[at]}:{job_id}"]
        for key in keys:
            keys += [child.decode() for child in self.raw.smembers(f"{key}:dependencies")]
        return bool(self.raw.exists(*(f"{key}:lock" for key in keys)))

    async def close(self) -> None:
        for side in self.ours:
            await side.close()


@pytest.mark.clause("B-22", "B-23", "B-37", "B-43")
@pytest.mark.parametrize("major", [5, 6])
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@example(  # a parent waits again for a child that is sent back with all completed jobs
    tree=(0, {}, [(0, {}, ())]),
    steps=[("claim", 0, None), ("complete", 0, 0), ("retry-all", 0, "completed")],
)
@given(tree=TREES, steps=st.lists(STEPS, min_size=6, max_size=24))
def test_the_same_steps_leave_the_same_families(
    tree: Any,
    steps: list[tuple[str, int, Any]],
    major: int,
    nodes: Callable[[int, str], Node],
    raw: redis.Redis,
    server: str,
    runner: asyncio.Runner,
) -> None:
    families = Families(nodes(major, "official"), server, raw)
    runner.run(_live(families, [("flow", 0, tree), *steps], major))


async def _live(families: Families, steps: list[tuple[str, int, Any]], major: int) -> None:
    trail: list[Any] = []
    for verb, at, arg in steps:
        target = families.subject(verb, at, arg) if isinstance(arg, int) else arg
        if not families.may(verb, at, arg, target, major):
            continue
        trail.append((verb, at, target))
        try:
            await families.take(verb, at, target)
        except NodeError as error:
            pytest.fail(f"Node refused {trail}: {error}")
        for queue in families.queues:
            assert not differences(families.raw, queue, ordered=False), f"{queue}: {trail}"
    await families.close()
