"""Schedulers that Node set up go on when our worker picks up their jobs."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest
import redis

from tenure.contracts.bullmq import schedulers
from tenure.core.errors import UsageError
from tenure.core.registry import open_queue
from tenure.store.embedded import locate_node
from tests.interop.bullmq.ours import worker
from tests.interop.bullmq.peer import HERE, Node
from tests.waiting import until

pytestmark = pytest.mark.clause("B-39", "B-40")


async def test_a_scheduler_of_node_makes_its_jobs_through_our_worker(
    node: Node, name: str, url: str, raw: redis.Redis
) -> None:
    template = {"name": "work", "data": {"result": "tick"}, "opts": {"attempts": 2}}
    async with worker(url):
        every = {"every": 70, "limit": 4}
        await node.acall(f"queue:{name}", "upsertJobScheduler", "tick", every, template)
        await until(lambda: raw.zcard(f"bull:{name}:completed") == 4, "four ticks")
    ids = [each.decode() for each in raw.zrange(f"bull:{name}:completed", 0, -1)]
    times = [int(each.rsplit(":", 1)[1]) for each in ids]
    assert [late - soon for soon, late in pairwise(times)] == [70] * 3
    assert raw.zcard(f"bull:{name}:delayed") == 0


async def test_the_next_job_is_the_one_node_would_have_made(
    node: Node, name: str, url: str, raw: redis.Redis
) -> None:
    repeat = {"pattern": "30 15 3 * * MON-FRI", "tz": "Europe/Berlin"}
    template = {"name": "report", "data": {"a": 1}, "opts": {"attempts": 3, "backoff": 5}}
    first = await node.acall(f"queue:{name}", "upsertJobScheduler", "night", repeat, template)
    await node.acall(f"job:{name}:{first['id']}", "promote")
    queue = open_queue(url, worker_id="w")
    (lease,) = await queue.claim(1, wait_ms=1_000)
    assert lease.job_id == first["id"]
    (after,) = [each.decode() for each in raw.zrange(f"bull:{name}:delayed", 0, -1)]
    begun = int(first["id"].rsplit(":", 1)[1])
    assert int(after.rsplit(":", 1)[1]) == schedulers.next_after(
        repeat["pattern"], begun, repeat["tz"]
    )
    made = await node.acall(f"job:{name}:{after}", "asJSON")
    assert made["opts"]["attempts"] == 3
    assert made["opts"]["repeat"]["count"] == 2
    await queue.close()


ZONES = {  # days on which their clocks change
    "UTC": ("2027-01-01",),
    "Asia/Kolkata": ("2027-01-01",),
    "Europe/Berlin": ("2027-03-28", "2026-10-25"),
    "America/New_York": ("2027-03-14", "2026-11-01"),
    "America/Havana": ("2027-03-14", "2026-11-01"),
    "Asia/Beirut": ("2027-03-28", "2026-10-25"),
    "Australia/Lord_Howe": ("2026-10-04", "2027-04-04"),
    "utc+3": ("2027-01-01",),
}


def field(rng: random.Random, least: int, most: int, *words: str) -> str:
    """A field of a cron pattern by chance; `words` are those that only this field takes."""
    one, (low, high) = rng.randint(least, most), sorted(rng.choices(range(least, most + 1), k=2))
    several = ",".join(map(str, sorted(rng.sample(range(least, most + 1), 3))))
    forms = ["*", "*", "*", str(one), f"{low}-{high}", f"*/{one or 1}", f"{low}-{high}/2", several]
    return rng.choice([*forms, f"{one}/3", "H", f"H({least}-{most})/4", "H/5", *words])


def asked(rng: random.Random) -> tuple[str, int, dict[str, str]]:
    """A pattern, a moment (half of them near a change of the clock), and options."""
    fields = [
        rng.choice(["0", "30", "*/20", field(rng, 0, 59)]),
        field(rng, 0, 59),
        field(rng, 0, 23),
        field(rng, 1, 31, "L", "?", "L,10"),
        field(rng, 1, 12, "JAN", "jun-AUG"),
        field(rng, 0, 7, "?", "MON-FRI", "5L", "2#1", "sun", "*#2"),
    ]
    pattern = " ".join(fields[-rng.choice([6, 6, 5, 5, 4, 3, 2, 1]) :])
    if rng.random() < 0.05:
        pattern = rng.choice(["@weekdays", "@weekends", "@hourly", "@monthly", "@yearly"])
    tz = rng.choice(list(ZONES))
    day = datetime.fromisoformat(f"{rng.choice(ZONES[tz])}T00:00:00+00:00")
    at = int(day.timestamp()) * 1000 + rng.randrange(-108_000_000, 108_000_000)
    if rng.random() < 0.5:
        at = rng.randrange(1_700_000_000_000, 1_900_000_000_000)
    return pattern, at, {"tz": tz, "hashSeed": rng.choice(["a", "se\u00e9d"])}


def told(package: str, questions: list[Any], **env: str) -> list[int | None]:
    """What the cron-parser of this BullMQ answers."""
    done = subprocess.run(
        [str(locate_node()), "cron.cjs", package],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        cwd=HERE,
        env={**os.environ, **env},
        check=True,
    )
    answers: list[int | None] = json.loads(done.stdout)
    return answers


@pytest.mark.clause("B-40")
def test_our_cron_agrees_with_the_one_node_uses() -> None:
    """Random patterns and moments; where 5.x and 6.x differ, 6.x rules (DEVIATIONS.md)."""
    rng = random.Random(7)
    questions = [asked(rng) for _ in range(500)]
    different = [
        (question, ours, theirs)
        for question, theirs in zip(questions, told("bullmq6", questions), strict=True)
        if (ours := next_after(*question)) != theirs and theirs is not None
    ]
    assert not different, different[:5]


@pytest.mark.clause("B-40")
@pytest.mark.parametrize("package", ["bullmq5", "bullmq581", "bullmq6"])
def test_ordinary_patterns_agree_with_every_version_through_changes_of_the_clock(
    package: str,
) -> None:
    rng = random.Random(11)
    patterns = ["30 2 * * *", "0 */3 * * *", "0 9 * * MON-FRI", "15 1,2 * * *", "0 0 1,15 * *"]
    questions = [
        (rng.choice(patterns), asked(rng)[1], {"tz": tz})
        for tz in ("Europe/Berlin", "America/New_York", "Asia/Kolkata")
        for _ in range(60)
    ]
    answers = told(package, questions)
    assert [next_after(*question) for question in questions] == answers


@pytest.mark.clause("B-40")
def test_without_a_time_zone_both_take_the_local_time_of_their_process() -> None:
    rng = random.Random(13)
    questions = [("30 2 * * *", asked(rng)[1], {}) for _ in range(40)]
    program = (
        "import json,sys;from tenure.contracts.bullmq.schedulers import next_after;"
        "print(json.dumps([next_after(t, m) for t, m, _ in json.load(sys.stdin)]))"
    )
    ours = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        env={**os.environ, "TZ": "America/New_York"},
        check=True,
    )
    assert json.loads(ours.stdout) == told("bullmq6", questions, TZ="America/New_York")


def next_after(pattern: str, at_ms: int, options: dict[str, str]) -> int | None:
    """Ours, or None where it finds nothing."""
    try:
        return schedulers.next_after(
            pattern, at_ms, options["tz"], seed=options.get("hashSeed", "")
        )
    except UsageError:
        return None
