"""What SDK users have beside the contract: a blocking client, `ctx.exec`, the monitor."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Generator
from typing import Any

import msgspec
import pytest

from tenure.contracts.omniq import JobContext, SyncClient, TokenMismatch
from tests.contract.omniq.conftest import Bench
from tests.waiting import until

DEADLINE_S = 20.0


@pytest.fixture
def blocking(bench: Bench) -> Generator[SyncClient]:
    with SyncClient(bench.server) as client:
        yield client


@pytest.mark.clause("O-54")
def test_a_program_without_an_event_loop_has_every_call(bench: Bench, blocking: SyncClient) -> None:
    queue = bench.name
    job_id = blocking.publish(queue=queue, payload={"a": 1}, gid="g")
    job = blocking.reserve(queue=queue)
    assert (job.job_id, job.gid) == (job_id, "g")
    assert blocking.heartbeat(queue=queue, job_id=job_id, lease_token=job.lease_token)
    blocking.ack_success(queue=queue, job_id=job_id, lease_token=job.lease_token)
    with pytest.raises(TokenMismatch):
        blocking.ack_success(queue=queue, job_id=job_id, lease_token=job.lease_token)
    assert blocking.pause(queue=queue) == "OK"
    assert blocking.is_paused(queue=queue)
    assert blocking.resume(queue=queue) == 1
    assert blocking.monitor.get_job(queue, job_id).state == "completed"
    assert blocking.queue_base(queue) == f"{{{queue}}}"


@pytest.mark.clause("O-54")
def test_threads_share_one_blocking_client(bench: Bench, blocking: SyncClient) -> None:
    ids: list[str] = []

    def publish() -> None:
        ids.extend(blocking.publish(queue=bench.name, payload={"n": n}) for n in range(10))

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(set(ids)) == 40
    assert sorted(bench.ids("wait")) == sorted(ids)


@pytest.mark.clause("O-54", "O-45")
def test_a_blocking_consumer_runs_until_a_signal(bench: Bench) -> None:
    program = f"""
        import os, signal
        from tenure.contracts.omniq import SyncClient
        with SyncClient({bench.server!r}) as client:
            client.publish(queue={bench.name!r}, payload={{"n": 1}})

            def handler(ctx):
                print("ran", ctx.payload["n"], flush=True)
                os.kill(os.getpid(), signal.SIGTERM)

            client.consume(queue={bench.name!r}, handler=handler)
        print("ended")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout.split("\n")[:2], done.stderr) == (["ran 1", "ended"], "")
    assert len(bench.ids("completed")) == 1


async def _consume(bench: Bench, handler: Any, holds: Callable[[], bool]) -> None:
    stop = asyncio.Event()
    consuming = asyncio.create_task(
        bench.client.consume(bench.name, handler, concurrency=4, stop=stop, signals=False)
    )
    try:
        await until(lambda: holds() or consuming.done(), within_s=DEADLINE_S)
    finally:
        stop.set()
        await asyncio.wait_for(consuming, DEADLINE_S)


@pytest.mark.clause("O-55")
@pytest.mark.parametrize("plain", [False, True])
async def test_a_handler_publishes_and_counts_children_by_its_context(
    bench: Bench, plain: bool
) -> None:
    key, heard = f"parent-{bench.name}", []
    await bench.publish({"parent": True})

    async def handle(ctx: JobContext) -> None:
        if ctx.payload.get("parent"):
            await ctx.exec.childs_init(key, 3)
            for _ in range(3):
                await ctx.exec.publish(ctx.queue, {"child": True}, max_attempts=1)
        else:
            heard.append(await ctx.exec.child_ack(key))
            assert await ctx.exec.is_paused(queue=ctx.queue) is False

    def handle_plainly(ctx: JobContext) -> None:
        if ctx.payload.get("parent"):
            ctx.exec.childs_init(key, 3)
            for _ in range(3):
                ctx.exec.publish(queue=ctx.queue, payload={"child": True}, max_attempts=1)
        else:
            heard.append(ctx.exec.child_ack(key))
            assert ctx.exec.is_paused(queue=ctx.queue) is False

    handler = handle_plainly if plain else handle
    await _consume(bench, handler, lambda: len(bench.ids("completed")) == 4)
    assert sorted(heard) == [0, 1, 2]


@dataclasses.dataclass
class _Letter:
    to: str
    copies: int = 1


class _Struct(msgspec.Struct):
    to: str


class _Model:
    """What a pydantic model offers."""

    def model_dump(self, *, mode: str) -> dict[str, str]:
        return {"mode": mode}


@pytest.mark.clause("O-5")
async def test_publish_json_takes_objects_that_become_json_objects(bench: Bench) -> None:
    publish = bench.client.publish_json
    for payload, stored in (
        ({"a": 1}, '{"a":1}'),
        (_Letter("ada"), '{"to":"ada","copies":1}'),
        (_Struct("ada"), '{"to":"ada"}'),
        (_Model(), '{"mode":"json"}'),
    ):
        job_id = await publish(bench.name, payload, gid="g")
        assert bench.hash(job_id)["payload"] == stored
    for wrong in ("text", (1, 2), 5):
        with pytest.raises(TypeError, match="object or array"):
            await publish(bench.name, wrong)


@pytest.mark.clause("O-49")
async def test_an_overview_tells_counters_groups_and_samples(bench: Bench) -> None:
    await bench.publish(*[{}] * 3, max_attempts=1)
    await bench.publish({}, gid="g")
    await bench.publish({}, job_id="later", due_ms=9_000_000_000_000)
    monitor = bench.client.monitor
    job = await bench.reserve()
    await bench.client.ack_success(bench.name, job.job_id, job.lease_token)
    job = await bench.reserve()
    await bench.client.ack_fail(bench.name, job.job_id, job.lease_token)
    held = await bench.reserve()
    seen = await monitor.overview(bench.name, samples_per_lane=5)
    assert seen.stats.waiting_total == 1
    assert [each.job.job_id for each in seen.active] == [held.job_id]
    assert [each.job.job_id for each in seen.failed] == [job.job_id]
    assert [each.job.job_id for each in seen.delayed] == ["later"]
    assert len(seen.completed) == 1
    assert bench.name in await monitor.scan_queues()
    assert (await monitor.get_job(bench.name, held.job_id)) == seen.active[0].job
