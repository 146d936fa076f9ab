"""Every choice of deduplication, against a job in every state: the same data by Node and by us."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from tests.interop.bullmq.peer import Node
from tests.interop.bullmq.twins import ONLY_IN_6, OfficialSide, OurSide, differences

pytestmark = pytest.mark.clause("B-7", "B-43")
_unique = itertools.count(1)

WORDS = {
    "ttl": 60_000,
    "extend": True,
    "replace": True,
    "keepLastIfActive": True,
    "reschedule": True,
}


def ways_there(options: dict[str, Any]) -> dict[str, list[tuple[str, Any]]]:
    """How a deduplicated job 1 comes to stand in each place."""
    late = {"delay": 60_000, **options}
    return {
        "delayed": [("add", late)],
        "waiting": [("add", options)],
        "prioritized": [("add", {"priority": 3, **options})],
        "promoted": [("add", late), ("promote", "1")],
        "active": [("add", options), ("claim", None)],
        "completed": [("add", options), ("claim", None), ("complete", "1")],
        "delayed by its backoff": [
            ("add", {"attempts": 2, "backoff": 60_000, **options}),
            ("claim", None),
            ("fail", "1"),
        ],
        "removed": [("add", options), ("remove", "1")],
    }


def stories(words: tuple[str, ...]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    options = {"deduplication": {"id": "d", **{word: WORDS[word] for word in words}}}
    for place, steps in ways_there(options).items():
        for delay in ({}, {"delay": 60_000}):
            story = [*steps, ("add", {**options, **delay})]
            story.append(("add", {"priority": 2, **options, **delay}))
            if place == "active":
                story += [("complete", "1"), ("claim", None)]
            yield f"{place}, then {delay}", story


def empty(raw: redis.Redis, queue: str) -> None:
    """Both sides begin anew; the settings stay, which Node writes once."""
    keys = [key for key in raw.scan_iter(f"*:{queue}:*", count=1000) if key[-5:] != b":meta"]
    raw.delete(*keys)


CHOICES = [words for size in range(6) for words in itertools.combinations(WORDS, size)]


@pytest.mark.parametrize(
    ("major", "words"),
    [
        pytest.param(major, words, id=f"bullmq{major}-{'+'.join(words) or 'simple'}")
        for major in (5, 6)
        for words in CHOICES
        if major == 6 or not ONLY_IN_6 & set(words)
    ],
)
async def test_a_job_that_comes_again_does_what_its_options_say(
    words: tuple[str, ...],
    major: int,
    nodes: Callable[[int, str], Node],
    raw: redis.Redis,
    server: str,
) -> None:
    queue = f"dedup{major}-{next(_unique)}"
    official = OfficialSide(nodes(major, "official"), queue, raw)
    ours = OurSide(server, queue, raw)
    for place, story in stories(words):
        for number, (verb, arg) in enumerate(story):
            official.do(verb, arg)
            await ours.do(verb, arg)
            assert not differences(raw, queue), f"{place}: {story[: number + 1]}"
        empty(raw, queue)
    await ours.close()
