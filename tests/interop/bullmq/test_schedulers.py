"""Schedulers that Node set up go on when our worker picks up their jobs."""

from __future__ import annotations

import json
import random
import subprocess
from itertools import pairwise

import pytest
import redis

from leasehold.contracts.bullmq import cron
from leasehold.core.errors import UsageError
from leasehold.core.opening import open_queue
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
    assert int(after.rsplit(":", 1)[1]) == cron.next_after(repeat["pattern"], begun, repeat["tz"])
    made = await node.acall(f"job:{name}:{after}", "asJSON")
    assert made["opts"]["attempts"] == 3
    assert made["opts"]["repeat"]["count"] == 2
    await queue.close()


@pytest.mark.clause("B-40")
def test_our_cron_agrees_with_the_one_node_uses() -> None:
    """Random patterns and moments, both ways."""
    rng = random.Random(7)
    asked = []
    for _ in range(150):
        pattern = " ".join(
            [
                rng.choice(["0", "30", "*/20"]),
                rng.choice(["*", "0", "*/15", "5,50", "10-20"]),
                rng.choice(["*", "3", "9-17", "*/6", "0"]),
                rng.choice(["*", "1", "15", "28-31", "L", "*/10"]),
                rng.choice(["*", "*", "2", "JAN,JUN", "6-8"]),
                rng.choice(["*", "*", "MON-FRI", "0", "7", "5L", "2#1"]),
            ]
        )
        tz = rng.choice(["UTC", "Europe/Berlin", "Asia/Kolkata"])
        asked.append((pattern, rng.randrange(1_700_000_000, 1_900_000_000) * 1000, tz))
    program = (
        "const p=require('cron-parser');const i=require('fs').readFileSync(0,'utf8');"
        "console.log(JSON.stringify(JSON.parse(i).map(([t,m,z])=>{try{return "
        "(p.CronExpressionParser||p.default)"
        ".parse(t,{currentDate:new Date(m),tz:z}).next().getTime()"
        "}catch(e){return String(e.message)}})))"
    )
    done = subprocess.run(
        ["node", "-e", program],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=HERE / "node_modules" / "bullmq6",
    )
    assert done.returncode == 0, done.stderr
    different = []
    for (pattern, at, tz), expected in zip(asked, json.loads(done.stdout), strict=True):
        ours = cron.next_after(pattern, at, tz)
        if ours != expected:
            different.append((pattern, at, tz, ours, expected))
    assert not different, different[:5]


@pytest.mark.parametrize("pattern", ["", "* * * *", "61 * * * * *", "a * * * * *", "*/0 * * * *"])
def test_a_pattern_that_is_none_says_so(pattern: str) -> None:
    with pytest.raises(UsageError, match="cron pattern"):
        cron.parse(pattern)
