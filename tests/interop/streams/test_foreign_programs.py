"""A worker and a gateway of another make share the queue with ours."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tenure import Worker, task
from tests.contract.gateway.web import Web
from tests.interop.streams.conftest import Stage
from tests.waiting import until


@task("chat")
async def ours(job):
    await asyncio.sleep(job.payload.get("work_s", 0))
    return {"by": "ours"}


@asynccontextmanager
async def our_worker(stage: Stage, **options: object) -> AsyncGenerator[None]:
    worker = Worker([ours], queues=[stage.url(**options)], concurrency=2)
    serving = asyncio.create_task(worker.serve())
    try:
        yield
    finally:
        worker.stop()
        assert await asyncio.wait_for(serving, 30) == 0


async def submitted(web: Web, **more: str) -> str:
    reply = await web.post("/v1/jobs", {"task": "chat", "payload": {"work_s": 0}}, **more)
    assert reply.status == 202, reply.body
    return str(reply.json["job_id"])


async def test_a_foreign_worker_serves_the_jobs_of_our_gateway(stage: Stage) -> None:
    web = await stage.our_gateway()
    await stage.foreign_worker()
    job_id = await submitted(web)
    names = [event.name for event in await (await web.follow(job_id)).all()]
    assert names == ["hello", "queued", "running", "done"]
    assert (await web.get(f"/v1/jobs/{job_id}")).json["result"] == {"by": "foreign"}


async def test_our_worker_serves_the_jobs_of_a_foreign_gateway(stage: Stage) -> None:
    web = await stage.foreign_gateway()
    async with our_worker(stage):
        job_id = await submitted(web)
        names = [event.name for event in await (await web.follow(job_id)).all()]
    assert names == ["hello", "queued", "running", "done"]
    job = (await web.get(f"/v1/jobs/{job_id}")).json
    assert (job["status"], job["result"], job["error"]) == ("done", {"by": "ours"}, None)


@pytest.mark.parametrize("gateway", ["ours", "foreign"])
async def test_both_workers_share_a_queue_of_jobs_that_outlast_our_lease(
    stage: Stage, gateway: str
) -> None:
    web = await (stage.our_gateway() if gateway == "ours" else stage.foreign_gateway())
    foreign = [await stage.foreign_worker(f"foreign-{n}") for n in range(2)]
    body = {"task": "chat", "payload": {"work_s": 1.5}}
    async with our_worker(stage, lease_ms=300):
        replies = [await web.post("/v1/jobs", body) for _ in range(8)]
        job_ids = [reply.json["job_id"] for reply in replies]

        async def all_done() -> bool:
            return {await stage.status(job_id) for job_id in job_ids} == {"done"}

        await until(all_done, "all jobs are done", within_s=40)
    assert [await stage.runs(job_id) for job_id in job_ids] == [1] * 8
    results = [(await web.get(f"/v1/jobs/{job_id}")).json["result"]["by"] for job_id in job_ids]
    assert {name.partition("-")[0] for name in results} == {"ours", "foreign"}
    assert (await stage.redis.xpending("jobs:stream", "workers"))["pending"] == 0
    assert all(process.returncode is None for process in foreign)


async def test_the_job_of_a_foreign_worker_that_was_killed_is_taken_over(stage: Stage) -> None:
    web = await stage.our_gateway()
    process = await stage.foreign_worker()
    reply = await web.post("/v1/jobs", {"task": "chat", "payload": {"work_s": 2}})
    job_id = reply.json["job_id"]
    await until(lambda: stage.runs(job_id), "the foreign worker has begun")
    process.kill()
    async with our_worker(stage, lease_ms=300, foreign_lease_ms=1000):

        async def is_done() -> bool:
            return await stage.status(job_id) == "done"

        await until(is_done, "our worker has taken it over")
    assert (await web.get(f"/v1/jobs/{job_id}")).json["result"] == {"by": "ours"}


async def test_an_idempotency_key_is_honoured_by_either_gateway(stage: Stage) -> None:
    us, them = await stage.our_gateway(), await stage.foreign_gateway()
    first = await submitted(us, idempotency_key="ours-first")
    assert await submitted(them, idempotency_key="ours-first") == first
    second = await submitted(them, idempotency_key="theirs-first")
    assert await submitted(us, idempotency_key="theirs-first") == second
    await stage.redis.delete(f"job:{second}", f"job:{second}:events")
    third = await submitted(us, idempotency_key="theirs-first")
    assert third != second
    assert (await us.get(f"/v1/jobs/{third}")).status == 200


@pytest.mark.alone
async def test_events_of_a_foreign_worker_reach_our_followers_at_once(stage: Stage) -> None:
    web = await stage.our_gateway()
    await stage.foreign_worker()
    body = {"task": "chat", "payload": {"work_s": 2, "events": 60}}
    job_id = (await web.post("/v1/jobs", body)).json["job_id"]
    late_ms = [
        (time.time() - event.json["data"]["sent_s"]) * 1000
        async for event in await web.follow(job_id)
        if event.name == "progress"
    ]
    assert len(late_ms) == 60
    assert statistics.median(late_ms) < 20, sorted(late_ms)
