"""The next run of a scheduler never fails a claim; cron patterns mean what they mean to Node."""

import json
import os
import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest
import structlog

from tenure.contracts.bullmq import schedulers
from tenure.core.errors import UsageError
from tenure.core.job import NewJob
from tenure.core.outcome import COMPLETED, Outcome
from tenure.plans.schedule import new_schedule
from tests.contract.bullmq.conftest import Bench

pytestmark = pytest.mark.clause("B-39", "B-40")
MS = 1_000


async def scheduled(bench: Bench, **repeat: Any) -> str:
    """The job of a scheduler whose repeat options are as another program wrote them; it waits."""
    job_id = await bench.producer().upsert_scheduler("tick", pattern="0 0 3 * * *", name="work")
    opts = json.loads(bench.hash(job_id)["opts"])
    opts["repeat"] = {key: value for key, value in repeat.items() if value is not None}
    bench.raw.hset(bench.key(job_id), "opts", json.dumps(opts))
    assert await bench.ledger().promote([job_id]) == ["ok"]
    return job_id


@pytest.mark.parametrize(
    "repeat",
    [
        {"pattern": "every full moon"},
        {"pattern": "61 * * * * *"},
        {"pattern": "0 0 30 2 *"},
        {"pattern": "0 3 * * *", "tz": "Mars/Olympus"},
        {"pattern": "* " * 2_000},
        {"pattern": {"of": "another program"}},
        {"pattern": "0 3 * * *", "startDate": "soon"},
        {"every": "often"},
        {"every": -5},
        {},
    ],
    ids=lambda repeat: str(repeat)[:40],
)
async def test_a_schedule_that_cannot_be_computed_leaves_the_claim_and_its_jobs_alone(
    bench: Bench, repeat: dict[str, Any]
) -> None:
    job_id = await scheduled(bench, **repeat)
    other = await bench.producer().add("work", {})
    queue = bench.queue()
    with structlog.testing.capture_logs() as logs:
        leases = await queue.claim(10, wait_ms=0)
    assert {lease.job_id for lease in leases} == {job_id, other}
    ends = [Outcome(lease, "complete", result=b"1") for lease in leases]
    assert await queue.settle(ends) == [COMPLETED, COMPLETED]
    assert bench.raw.zscore(bench.key("repeat"), "tick"), "the scheduler stays for Node"
    if isinstance(repeat.get("pattern"), str):
        (told,) = logs
        assert (told["log_level"], told["scheduler"], told["job"]) == ("warning", "tick", job_id)


@pytest.mark.parametrize(
    "fields",
    [
        {"opts": '{"priority":"high","attempts":[3]}'},
        {"opts": '{"priority":1e400,"attempts":1e300}'},
        {"opts": '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"},
        {"every": "9" * 5_000},
        {"every": "\u00b2"},
        {"name": b"\xff", "data": b"\xff", "tz": b"\xff", "pattern": b"\xff"},
    ],
    ids=lambda fields: str(fields)[:30],
)
async def test_a_scheduler_that_another_program_garbled_hides_no_other(
    bench: Bench, fields: dict[str, Any]
) -> None:
    await bench.producer().upsert_scheduler("bad", every=60_000, name="work")
    bench.raw.hset(bench.key("repeat:bad"), mapping=fields)
    bench.raw.zadd(bench.key("repeat"), {"bad": 9e15})
    schedules = bench.queue().features.schedules
    assert schedules is not None
    for name in ("one", "two"):
        job = NewJob(task="good", payload=b"{}")
        assert (await schedules.put(new_schedule(job, name=name, every_s=60))).next_ms > 0
    assert {each.name for each in await schedules.list()} == {"one", "two", "bad"}


@pytest.mark.parametrize(
    "pattern",
    [
        "@weekdays",
        "@weekends",
        "@hourly",
        "@secondly",
        "H * * * *",
        "H(0-10)/3 H * * *",
        "* * * *",
        "3",
        "0 0 L * *",
        "0 9 * * 5L",
        "0 9 * * TUE#2",
        "*/5 * ? * MON-FRI",
        "1,1 * * * *",
    ],
)
async def test_every_pattern_that_node_takes_leads_to_a_next_job(
    bench: Bench, pattern: str
) -> None:
    job_id = await scheduled(bench, pattern=pattern, tz="America/New_York")
    queue = bench.queue()
    (lease,) = await queue.claim(1, wait_ms=0)
    assert lease.job_id == job_id
    (after,) = bench.ids("delayed")
    assert after.startswith("repeat:tick:")


async def test_a_scheduler_whose_hash_is_of_another_type_does_not_fail_the_claim(
    bench: Bench,
) -> None:
    job_id = await scheduled(bench, pattern="0 4 * * *")
    bench.raw.set(bench.key("repeat:tick"), "x")
    (lease,) = await bench.queue().claim(1, wait_ms=0)
    assert lease.job_id == job_id


async def test_the_next_run_of_a_scheduler_that_ends_before_it_is_not_made(bench: Bench) -> None:
    soon = bench.raw.time()[0] * MS + 60_000
    await scheduled(bench, pattern="0 0 1 1 *", endDate=soon)
    assert len(await bench.queue().claim(1, wait_ms=0)) == 1
    assert bench.ids("delayed") == []


BERLIN = "Europe/Berlin"


@pytest.mark.parametrize(
    ("pattern", "after", "due"),
    [
        # 02:30 does not exist on 28 March 2027: it happens in the hour that follows.
        ("30 2 * * *", "2027-03-27T12:00:00Z", "2027-03-28T01:30:00Z"),
        # 02:30 exists twice on 25 October 2026, and happens once.
        ("30 2 * * *", "2026-10-24T12:00:00Z", "2026-10-25T00:30:00Z"),
        ("30 2 * * *", "2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"),
        # Every hour is every hour, through both changes.
        ("0 * * * *", "2026-10-25T00:00:00Z", "2026-10-25T01:00:00Z"),
        ("0 * * * *", "2027-03-28T00:00:00Z", "2027-03-28T01:00:00Z"),
    ],
)
def test_changes_of_the_clock_are_taken_as_node_takes_them(
    pattern: str, after: str, due: str
) -> None:
    assert schedulers.next_after(pattern, _ms(after), BERLIN) == _ms(due)


def test_without_a_time_zone_the_local_time_of_the_process_counts() -> None:
    program = (
        "from tenure.contracts.bullmq.schedulers import next_after as n;print(n('0 3 * * *', 0))"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TZ": tz},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for tz in ("UTC", "Asia/Tokyo", "America/New_York")
    ]
    assert [int(each) // 3_600_000 for each in told] == [3, 18, 8]


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "61 * * * * *",
        "a * * * * *",
        "*/0 * * * *",
        "1 2 3 4 5 6 7",
        "* * * * L",
        "* * * * 1#6",
        "5-1 * * * *",
        "* * * * 1#1,2",
        "1- * * * *",
        "H(9-3) * * * *",
        "٣ * * * *",
    ],
)
def test_a_pattern_that_is_none_says_so(pattern: str) -> None:
    with pytest.raises(UsageError, match="cron pattern"):
        schedulers.parse(pattern)


def test_a_seed_without_end_is_refused_and_not_hashed() -> None:
    with pytest.raises(UsageError, match="cron pattern: a seed"):
        schedulers.parse("H * * * *", seed="x" * 1_000_000)


def _ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp()) * MS
