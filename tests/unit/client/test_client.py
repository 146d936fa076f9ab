"""The client by itself: what it refuses, what it does when a store is away, and how it closes."""

from __future__ import annotations

import asyncio

import pytest

from tenure import Client, JobFailed, StoreUnreachable, TenureError, task
from tenure.core.errors import (
    Conflict,
    InvalidJob,
    InvalidResult,
    JobCancelled,
    NotFound,
    QueueFull,
    Timeout,
    UsageError,
)
from tenure.testing import serving


@task("greet")
async def greet(name: str) -> str:
    return f"Hello, {name}"


AWAY = "streams+redis://127.0.0.1:1/0"


async def test_a_store_that_is_away_is_an_error_of_every_call() -> None:
    async with Client(AWAY) as client:
        handle = client.handle("j")
        for call in (client.counts, client.pause, handle.status, handle.cancel, handle.result):
            with pytest.raises(StoreUnreachable):
                await call()
        with pytest.raises(StoreUnreachable):
            await client.submit(greet, name="Ada")
        with pytest.raises(StoreUnreachable):
            _ = [event async for event in handle.events()]


async def test_what_is_no_task_is_refused() -> None:
    async with Client("memory://no-task") as client:
        with pytest.raises(UsageError, match="is no task"):
            await client.submit(lambda: None)  # type: ignore[call-overload]
        with pytest.raises(UsageError, match="one payload"):
            await client.submit("greet", {}, {})  # type: ignore[call-overload]


async def test_who_waits_when_the_client_closes_gets_an_error() -> None:
    client = Client("memory://closing")
    handle = await client.submit(greet, name="Ada")
    waiting = asyncio.create_task(handle.result())
    while not client._connection.feed._ends:
        await asyncio.sleep(0.01)  # nothing tells when a handle begins to wait
    await client.close()
    with pytest.raises(UsageError, match="closed"):
        await waiting
    with pytest.raises(UsageError, match="closed"):
        await Client.submit(client, greet, name="Bob")


def test_every_refusal_is_of_one_tree() -> None:
    kinds = (Conflict, InvalidJob, InvalidResult, JobCancelled, JobFailed, NotFound)
    for kind in (*kinds, QueueFull, StoreUnreachable, Timeout):
        assert issubclass(kind, TenureError)
    assert issubclass(Timeout, TimeoutError)
    assert QueueFull("full", retry_after_ms=1_500).retry_after_s == 1.5


async def test_jobs_that_ended_before_they_were_awaited_are_read_once() -> None:
    async with serving(greet) as queue:
        handles = await queue.client.submit_many([greet.call(name=str(n)) for n in range(50)])
        first = await asyncio.gather(*(each.result(timeout_s=5) for each in handles))
        again = await asyncio.gather(*(each.result(timeout_s=5) for each in handles))
    assert first == again == [f"Hello, {n}" for n in range(50)]
