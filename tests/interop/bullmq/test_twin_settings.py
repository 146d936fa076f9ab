"""What queue and worker are set to (limits, metrics, retention) leaves the same on both sides."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tenure.contracts.bullmq import Flow
from tests.interop.bullmq.peer import Node
from tests.interop.bullmq.twins import OfficialSide, OurSide, differences

pytestmark = pytest.mark.clause("B-43")
_unique = itertools.count(1)
Steps = list[tuple[str, Any]]


class Twins:
    """One queue on both sides, its workers set to the same."""

    def __init__(
        self, node: Node, server: str, raw: redis.Redis, theirs: dict[str, Any], ours: Any
    ) -> None:
        self.node, self.raw = node, raw
        self.queue = f"set{node.major}-{next(_unique)}"
        self.official = OfficialSide(node, self.queue, raw, theirs)
        self.ours = OurSide(server, self.queue, raw, **ours)

    async def do(self, steps: Steps) -> None:
        for verb, arg in steps:
            self.official.do(verb, arg)
            await self.ours.do(verb, arg)
            assert not differences(self.raw, self.queue), (verb, arg)

    def held(self) -> list[list[str]]:
        return [sorted(self.official.held), sorted(self.ours.held)]


@pytest.fixture(params=[5, 6], ids=["bullmq5", "bullmq6"])
async def twins(
    request: pytest.FixtureRequest,
    nodes: Callable[[int, str], Node],
    server: str,
    raw: redis.Redis,
) -> Any:
    made: list[Twins] = []

    def make(theirs: dict[str, Any] | None = None, **ours: Any) -> Twins:
        made.append(Twins(nodes(request.param, "official"), server, raw, theirs or {}, ours))
        return made[-1]

    yield make
    for each in made:
        await each.ours.close()


@pytest.mark.clause("B-15")
async def test_the_workers_limiter_counts_and_stops_alike(twins: Callable[..., Twins]) -> None:
    both = twins({"limiter": {"max": 2, "duration": 60_000}}, limit_max=2, limit_ms=60_000)
    await both.do([("add", {}), ("add", {"priority": 1}), ("add", {})])
    await both.do([("claim", None)] * 4)
    assert both.held() == [["1", "3"], ["1", "3"]]


@pytest.mark.clause("B-15", "B-51")
async def test_a_handler_that_asks_for_a_rest_stops_the_queue_alike(
    twins: Callable[..., Twins],
) -> None:
    both = twins({"limiter": {"max": 9, "duration": 60_000}}, limit_max=9, limit_ms=60_000)
    await both.do([("add", {}), ("add", {}), ("add", {"priority": 2})])
    await both.do([("claim", None), ("rest", "1"), ("claim", None)])
    both.official.held.remove("1")
    assert both.held() == [[], []]


@pytest.mark.clause("B-14")
async def test_the_queues_concurrency_holds_alike(twins: Callable[..., Twins]) -> None:
    both = twins()
    both.node.call(f"queue:{both.queue}", "setGlobalConcurrency", 1)
    await both.ours._producer.limit(concurrency=1)
    await both.do([("add", {}), ("add", {}), ("claim", None), ("claim", None)])
    assert both.held() == [["1"], ["1"]]
    await both.do([("complete", "1"), ("claim", None)])
    both.official.held.remove("1")
    assert both.held() == [["2"], ["2"]]


@pytest.mark.clause("B-29")
async def test_finished_jobs_are_counted_alike(twins: Callable[..., Twins]) -> None:
    both = twins({"metrics": {"maxDataPoints": 5}}, metrics_minutes=5)
    await a_minute_with_time_left()
    await both.do([("add", {}) for _ in range(4)])
    for n in (1, 2):
        await both.do([("claim", None), ("complete", str(n))])
    for side in ("official", "ours"):  # three minutes pass
        key = f"{side}:{both.queue}:metrics:completed"
        both.raw.hincrby(key, "prevTS", -180_000)
    await both.do([("claim", None), ("complete", "3"), ("claim", None), ("fatal", "4")])


async def a_minute_with_time_left(least_s: int = 10) -> None:
    """Both sides count by the clock's minute, so they have to end their jobs in the same one."""
    left_s = 60 - time.time() % 60
    if left_s < least_s:
        await asyncio.sleep(left_s)


@pytest.mark.clause("B-25")
@pytest.mark.parametrize(
    "keep", [True, 0, 1, 2, {"count": 1}, {"age": 60}, {"age": 60, "count": 2}]
)
@pytest.mark.parametrize("end", ["complete", "fatal"])
async def test_what_is_kept_of_finished_jobs_is_the_same(
    twins: Callable[..., Twins], keep: Any, end: str
) -> None:
    both = twins()
    options = {"removeOnComplete": keep, "removeOnFail": keep, "keepLogs": 1}
    for n in range(1, 5):
        await both.do([("add", options), ("claim", None), ("log", str(n)), ("log", str(n))])
        await both.do([(end, str(n))])
        if n == 2:
            await age(both, 120_000)


async def age(both: Twins, ms: int) -> None:
    """Makes what has ended so much older."""
    for side, state in itertools.product(("official", "ours"), ("completed", "failed")):
        key = f"{side}:{both.queue}:{state}"
        for member in both.raw.zrange(key, 0, -1):
            both.raw.zincrby(key, -ms, member)


@pytest.mark.clause("B-51", "B-22")
async def test_a_parent_parks_on_children_it_added_alike(twins: Callable[..., Twins]) -> None:
    both = twins()
    await both.do([("add", {"jobId": "film", "priority": 3}), ("claim", None)])
    mother = {"id": "film", "queue": f"official:{both.queue}"}
    both.official.do("add", {"jobId": "scene", "parent": mother})
    scene = Flow(name="work", data={"n": 1}, options={"jobId": "scene"})
    await both.ours._producer.add_children("film", [scene])
    await both.do([("park", "film"), ("claim", None), ("complete", "scene")])
    await both.do([("claim", None), ("complete", "film")])


@pytest.mark.clause("B-42")
@pytest.mark.parametrize("state", ["wait", "delayed", "prioritized", "completed", "failed"])
@pytest.mark.parametrize("limit", [0, 1, 3])
async def test_a_clean_takes_the_same_jobs_by_age_and_number(
    twins: Callable[..., Twins], state: str, limit: int
) -> None:
    both = twins()
    where = {"delayed": {"delay": 10_000_000_000_000}, "prioritized": {"priority": 2}}
    for old in (True, False, True, False, True):
        await both.do([("add", {**where.get(state, {}), **({"timestamp": 1} if old else {})})])
    if state in ("completed", "failed"):
        end = "complete" if state == "completed" else "fatal"
        for n in range(1, 6):
            await both.do([("claim", None), (end, str(n))])
        await both.do([("clean", (state, 3_600_000, limit))])
        await age(both, 7_200_000)
    await both.do([("clean", (state, 3_600_000, limit))])
    await both.do([("clean", (state, 0, limit))])
