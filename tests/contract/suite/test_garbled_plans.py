"""Schedules and chains that another program wrote hold up no others, in every contract."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from tenure import Client, Job, JobFailed, task
from tenure.core.errors import UsageError
from tenure.core.job import JobTemplate, NewJob, Schedule
from tenure.core.registry import open_queue
from tenure.core.seam import Queue, Records
from tenure.plans.schedule import GROUP, ROUND_BYTES_MAX, new_schedule
from tenure.worker import Worker
from tenure.worker.config import Settings
from tests.contract.adapters import Stage, served_url
from tests.contract.suite.serving import serving, until
from tests.waiting import until as eventually

pytestmark = pytest.mark.clause("M-24", "M-25", "I-75")

SOON_S = 20.0
HUGE = 10**30
NESTED = "[" * 100_000 + "]" * 100_000


def garbled(name: str, template: dict[str, Any], **fields: Any) -> str:
    """A stored schedule that is due."""
    made = {"name": name, "template": {"task": "bad", **template}, "every_ms": 1_000, "next_ms": 1}
    return json.dumps(made | fields)


GARBLED = {
    "no-json": "{",
    "nested": garbled("nested", {"options": {"a": 1}}).replace('{"a": 1}', f'{{"a": {NESTED}}}'),
    "payload": garbled("payload", {"payload": NESTED}),
    "no-payload": garbled("no-payload", {"payload": "{"}),
    "nul": garbled("nul", {"task": "a\0b", "gid": "\0", "trace": "\0\n\t"}),
    "stream": garbled("stream", {"options": {"stream": ["x"]}}),
    "options": garbled("options", {"options": {"request_hash": [5], "timeout_ms": {}}}),
    "attempts": garbled("attempts", {"max_attempts": HUGE}),
    "priority": garbled("priority", {"priority": -HUGE}),
    "ttl": garbled("ttl", {"ttl_ms": HUGE}),
    "next": garbled("next", {}, next_ms=HUGE),
    "last": garbled("last", {}, last_ms=HUGE),
    "every": garbled("every", {}, every_ms=-5),
    "often": garbled("often", {"payload": '"' + "x" * 1_000_000 + '"'}, every_ms=1, missed="all"),
    "cron": garbled("cron", {}, every_ms=0, cron="\u00b2 * * * *"),
    "zone": garbled("zone", {}, every_ms=0, cron="* * * * *", tz="../../\0"),
    "other-name": garbled("good", {}),
}


@asynccontextmanager
async def queue_of(stage: Stage) -> AsyncGenerator[tuple[Queue, Records]]:
    """Another instance of the queue, where its jobs are, and the records beside it."""
    queue = open_queue(served_url(stage), worker_id="scheduler")
    schedules: Any = queue.features.schedules
    try:
        yield queue, schedules._records
    finally:
        await queue.close()


@pytest.mark.needs("stored_schedules")
async def test_a_garbled_schedule_holds_up_no_other(stage: Stage) -> None:
    async with queue_of(stage) as (queue, records):
        schedules = queue.features.schedules
        assert schedules is not None
        for name, text in GARBLED.items():
            assert await records.swap(GROUP, name, "", text)
        good = await schedules.put(new_schedule(NewJob(task="good", payload=b"{}"), every_s=60))
        largest = 0

        async def submit(new: Any) -> Any:
            nonlocal largest
            largest = max(largest, sum(len(job.payload) for job in new))
            return await queue.submit(new)

        async def round_() -> bool:
            with suppress(Exception):  # of the others, when the good one is done
                await schedules.enqueue_due(submit, 60_000)
            return await stage.ledger.get(f"good@{good.next_ms}") is not None

        # The large one fills a round. Which come before it is by chance.
        await eventually(round_)
        await round_()
        assert largest <= ROUND_BYTES_MAX + 1_000_002, "one record makes no gigabytes"
        found = {each.name: each for each in await schedules.list()}
        assert found["good"].next_ms > good.next_ms
        assert found["good"].error == ""
        assert not found.keys() & {"no-json", "nested", "next", "last", "every", "other-name"}
        assert await schedules.remove("nested")


@pytest.mark.needs("stored_schedules")
async def test_a_garbled_schedule_stops_no_worker_and_keeps_no_declared_one_from_running(
    stage: Stage,
) -> None:
    ran = asyncio.Event()

    @task("tick", every_s=0.3)
    async def tick(job: Job) -> None:
        ran.set()

    async with queue_of(stage) as (_, records):
        for name, text in GARBLED.items():
            assert await records.swap(GROUP, name, "", text)
    # The worker may be one over HTTP; the jobs of a plane's schedules are stored by the plane.
    plane = Worker([tick], queues=[served_url(stage)], settings=Settings(upkeep_ms=100))
    worker = Worker([tick], queues=[stage.url], settings=Settings(upkeep_ms=100))
    served = [asyncio.ensure_future(each.serve()) for each in (plane, worker)]
    try:

        async def has_run() -> bool:
            assert not any(each.done() for each in served)
            return ran.is_set()

        await until(stage, has_run)
        async with Client(stage.url) as client:
            assert "tick" in {each.name for each in await client.schedules()}
    finally:
        plane.stop()
        worker.stop()
        await asyncio.gather(*served)
    async with queue_of(stage) as (queue, _):  # else a plane goes on while its history is judged
        assert queue.features.schedules is not None
        for name in [*GARBLED, "tick"]:
            await queue.features.schedules.remove(name)


def test_a_template_holds_what_the_schedules_above_have() -> None:
    """Else they would be unreadable for another reason than the one they are for."""
    known = {*JobTemplate.__struct_fields__, *Schedule.__struct_fields__}
    for name, text in GARBLED.items():
        if name not in ("no-json", "nested"):
            made = json.loads(text)
            assert {*made, *made["template"]} <= known


@pytest.mark.needs("flows")
@pytest.mark.needs("stored_schedules")
@pytest.mark.parametrize(
    "stored",
    ["{", f'{{"needs":1,"jobs":{NESTED}}}', '{"needs":1000000000000,"jobs":[]}', '{"needs":"x"}'],
    ids=["no-json", "nested", "endless", "no-number"],
)
async def test_a_garbled_chain_fails_its_own_job_and_no_other(stage: Stage, stored: str) -> None:
    @task("step")
    async def step(job: Job) -> int:
        return 1

    async with queue_of(stage) as (queue, records):
        assert await records.swap("flow:bad", "1", "", stored)
        ids = ["bad@0.0", "good-1", "good-2"]
        new = [NewJob(task="step", payload=b"{}", job_id=each) for each in ids]
        assert all(answer.accepted for answer in await queue.submit(new))
        assert queue.features.flows is not None
        with pytest.raises(UsageError, match="cannot be read"):
            await asyncio.wait_for(queue.features.flows.before("bad@1.0"), SOON_S)
    async with Client(stage.url) as client, serving(stage, step, upkeep_ms=100):
        for each in ids[1:]:
            assert await client.handle(each).result(timeout_s=SOON_S) == 1
        with pytest.raises(JobFailed, match="stage 1 of the chain 'bad' cannot be read"):
            await client.handle("bad@0.0").result(timeout_s=SOON_S)
