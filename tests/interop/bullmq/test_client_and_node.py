"""Our client submits, a Node worker works: the client hears of it as Node's own clients do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from tenure import Client, JobFailed
from tests.interop.bullmq.peer import Node

pytestmark = pytest.mark.clause("B-3", "B-5")


@pytest.fixture
async def client(url: str, node: Node, name: str) -> AsyncGenerator[Client]:
    await node.aask(do="work", queue=name, **{"as": name})
    async with Client(url) as client:
        yield client
    await node.aask(do="stop", **{"as": name})


async def test_a_result_of_node_is_awaited_without_polling(client: Client) -> None:
    handles = await client.submit_many([("work", {"result": {"n": n}}) for n in range(100)])
    began = time.monotonic()
    results = await asyncio.gather(*(each.result(timeout_s=20) for each in handles))
    assert results == [{"n": n} for n in range(100)]
    one = await client.submit("work", {"result": 1})
    await one.result(timeout_s=20)
    assert time.monotonic() - began < 10


async def test_a_failure_of_node_carries_its_stack(client: Client) -> None:
    handle = await client.submit("work", {"do": "fail", "why": "no ink"}, attempts=2)
    with pytest.raises(JobFailed, match="no ink") as failed:
        await handle.result(timeout_s=20)
    assert "at " in failed.value.traceback


async def test_the_events_of_a_job_of_node_end_with_its_end(client: Client) -> None:
    handle = await client.submit("work", {"result": 3})
    async with asyncio.timeout(20):
        events = [event async for event in handle.events()]
    assert events[-1].state == "done"
