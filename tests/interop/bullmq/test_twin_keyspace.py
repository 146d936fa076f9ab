"""The same steps through Node's own scripts and through ours leave the same data in Redis."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.interop.bullmq.peer import Node, NodeError
from tests.interop.bullmq.twins import ONLY_IN_6, OfficialSide, OurSide, differences

_unique = itertools.count(1)
# A short search by default; `TWIN_EXAMPLES=400` and a seed of one's own look further.
EXAMPLES = int(os.environ.get("TWIN_EXAMPLES", "60"))

LONG_AGO = 1_500_000_000_000
ADDS = st.sampled_from(
    [
        {},
        {},
        {"attempts": 3},
        {"attempts": 2, "backoff": {"type": "fixed", "delay": 60_000}},
        {"attempts": 3, "backoff": 60_000, "stackTraceLimit": 1},
        {"priority": 1},
        {"priority": 3, "attempts": 2},
        {"priority": 2_097_151},
        {"delay": 60_000},
        {"delay": 60_000, "priority": 2},
        {"lifo": True, "attempts": 3},
        {"jobId": "one"},
        {"jobId": "two", "removeOnComplete": True, "removeOnFail": True},
        {"removeOnComplete": 1, "removeOnFail": 1},
        {"removeOnComplete": {"count": 2}, "removeOnFail": {"age": 3600}},
        {"removeOnComplete": {"age": 3600, "count": 1}},
        {"deduplication": {"id": "d1"}},
        {"deduplication": {"id": "d2", "ttl": 60_000}},
        {"deduplication": {"id": "d3", "ttl": 60_000, "extend": True}},
        {"delay": 60_000, "deduplication": {"id": "d4", "replace": True}},
        {"delay": 60_000, "deduplication": {"id": "d5", "ttl": 60_000, "replace": True}},
        {"keepLogs": 2},
        {"timestamp": LONG_AGO},
        {"timestamp": LONG_AGO, "priority": 2},
        {"deduplication": {"id": "d6", "keepLastIfActive": True}},
        {"deduplication": {"id": "d7", "ttl": 60_000, "keepLastIfActive": True, "replace": True}},
        {"delay": 60_000, "deduplication": {"id": "d8", "reschedule": True}},
    ]
)  # fmt: skip
NUMBER = st.integers(0, 7)
STEPS = st.one_of(
    st.tuples(st.just("add"), ADDS),
    st.tuples(st.just("add"), ADDS),
    st.tuples(st.just("claim"), st.none()),
    st.tuples(st.just("claim"), st.none()),
    *(
        st.tuples(st.just(verb), NUMBER)
        for verb in (
            *("complete", "complete", "fail", "fail", "fatal", "release", "snooze", "progress"),
            *("extend", "remove", "again", "promote", "stall", "log", "log"),
            *("change-delay", "change-priority", "to-front"),
        )
    ),
    *(st.tuples(st.just(verb), st.none()) for verb in ("pause", "resume", "promote-all")),
    st.tuples(st.just("drain"), st.sampled_from(["waiting", "all"])),
    st.tuples(st.just("retry-all"), st.sampled_from(["failed", "completed"])),
    st.tuples(
        st.just("clean"),
        st.tuples(
            st.sampled_from(["completed", "failed", "wait", "delayed", "prioritized"]),
            st.sampled_from([0, 0, 60_000_000]),
            st.sampled_from([0, 1, 2, 100]),
        ),
    ),
)


# In which sets a step looks for its job; every other step is about one that runs.
SUBJECTS = {
    "again": ("failed",),
    "promote": ("delayed",),
    "change-delay": ("delayed",),
    "change-priority": ("prioritized", "delayed"),
    "to-front": ("prioritized", "delayed"),
    "remove": ("failed", "delayed", "completed", "prioritized"),
}


def _applies(verb: str, arg: Any, raw: redis.Redis, start: str, held: list[str]) -> Any:
    """The job that a step is about, or None when there is none it could be about."""
    if not isinstance(arg, int):
        return arg if arg is not None else True
    keys = SUBJECTS.get(verb)
    if keys:
        ids = [each.decode() for key in keys for each in raw.zrange(start + key, 0, -1)]
        if verb in ("remove", "change-priority", "to-front"):
            ids += [each.decode() for each in raw.lrange(start + "wait", 0, -1)]
        return sorted(ids)[arg % len(ids)] if ids else None
    return held[arg % len(held)] if held else None


@pytest.mark.clause("B-43")
@pytest.mark.parametrize("major", [5, 6])
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(steps=st.lists(STEPS, min_size=6, max_size=30))
def test_the_same_steps_leave_the_same_keyspace(
    steps: list[tuple[str, Any]],
    major: int,
    nodes: Callable[[int, str], Node],
    raw: redis.Redis,
    server: str,
    runner: asyncio.Runner,
) -> None:
    queue = f"twin{major}-{next(_unique)}"
    node = nodes(major, "official")
    official, ours = OfficialSide(node, queue, raw), OurSide(server, queue, raw)
    trail: list[str] = []
    paused = False
    for verb, arg in steps:
        target = _applies(verb, arg, raw, f"official:{queue}:", official.held)
        if target is None or (verb in ("pause", "resume") and (verb == "pause") == paused):
            continue
        if major == 5 and verb in ("pause", "again"):
            continue  # where 5.x itself differs from 6.x: the list `paused`, priority lost on retry
        if major == 5 and verb == "add" and ONLY_IN_6 & set(arg.get("deduplication", ())):
            continue  # 5.61 does not know these words
        paused = {"pause": True, "resume": False}.get(verb, paused)
        trail.append(f"{verb} {json.dumps(arg)} -> {target}")
        try:
            official.do(verb, target)
        except NodeError as error:
            pytest.fail(f"Node refused {trail}: {error}")
        runner.run(self_do(ours, verb, target))
        if verb in ("complete", "fail", "fatal", "release", "snooze"):
            official.held.remove(target)
        elif verb == "stall":
            official.held.remove(target)
            ours.held.pop(target, None)
        different = differences(raw, queue)
        assert not different, "\n".join(trail)
    runner.run(ours.close())


async def self_do(ours: OurSide, verb: str, target: Any) -> None:
    await ours.do(verb, target)
