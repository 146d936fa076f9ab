"""A client awaits and follows jobs that a worker of another make runs: it writes no journal."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from tenure import Client
from tenure.store.embedded import EmbeddedRedis
from tenure.sync import Client as SyncClient
from tests.contract.streams.test_foreign_workers import Foreign

pytestmark = pytest.mark.clause("S-38")


async def finished(worker: Foreign, msg_id: str, job_id: str) -> None:
    await worker.set(job_id, status="done", result='{"by":"another"}')
    await worker.event(job_id, "done")
    await worker.ack(msg_id)


async def test_the_result_of_a_foreign_worker_is_found_without_a_journal(bench: Any) -> None:
    await bench.queue().upkeep()
    async with Client(bench.url()) as client:
        handle = await client.submit("chat", {})
        waiting = asyncio.create_task(handle.result(timeout_s=20))
        worker = Foreign(bench)
        msg_id, job_id = await worker.take()
        while not client._connection.feed._ends:
            await asyncio.sleep(0.01)  # nothing tells when a handle begins to wait
        await finished(worker, msg_id, job_id)
        assert await waiting == {"by": "another"}


async def test_the_events_of_a_foreign_worker_arrive_as_they_happen(bench: Any) -> None:
    await bench.queue().upkeep()
    async with Client(bench.url()) as client:
        handle = await client.submit("chat", {})
        worker = Foreign(bench)
        msg_id, job_id = await worker.take()
        seen: list[str] = []

        async def read() -> None:
            async for event in handle.events():
                seen.append(event.type)  # noqa: PERF401  # each as it comes

        reading = asyncio.create_task(read())
        await worker.event(job_id, "token")
        async with asyncio.timeout(20):
            while "token" not in seen:
                await asyncio.sleep(0.01)  # the reader is this test's own
            await finished(worker, msg_id, job_id)
            await reading
        assert seen[-2:] == ["token", "done"]


def test_a_handle_is_good_after_a_fork(redis_server: EmbeddedRedis) -> None:
    with SyncClient(f"streams+{redis_server.url}?namespace=forked") as client:
        handle = client.submit("chat", {})
        assert handle.status().state == "waiting"  # the connection of this process is open
        child = os.fork()
        if not child:
            signal.alarm(20)  # of this child only
            try:
                is_cancelled = handle.cancel() == "ended" and handle.wait().state == "cancelled"
            except BaseException:
                is_cancelled = False
            os._exit(0 if is_cancelled else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert handle.wait(timeout_s=20).state == "cancelled"
