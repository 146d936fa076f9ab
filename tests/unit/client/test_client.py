"""The client by itself: what it refuses, what it does when a store is away, and how it closes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Message

from tenure import Client, JobFailed, StoreUnreachable, TenureError, Worker, task
from tenure.client.records import Event, JobInfo, QueueCounts
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
from tenure.worker import Settings


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
    with pytest.raises(UsageError, match="closed"):
        await handle.result(timeout_s=0.1)


async def test_who_follows_events_when_the_client_closes_is_told_so() -> None:
    client = Client("memory://closing-events")
    events = (await client.submit(greet, name="Ada")).events()
    await anext(events)
    following = asyncio.ensure_future(anext(events))
    (channel,) = client._connection.feed._channels.values()
    while not channel.has_live:
        await asyncio.sleep(0.01)  # nothing tells when a reader has caught up
    await client.close()
    with pytest.raises(UsageError, match="closed while the events"):
        await following


def test_a_closed_client_may_be_entered_again_also_in_another_loop() -> None:
    """As the lifespan of an application does, which is started anew for each of its tests."""
    client = Client("memory://entered-again")

    async def begin_and_end() -> None:
        worker = Worker([greet], queues=["memory://entered-again"], settings=Settings(upkeep_ms=50))
        served = asyncio.ensure_future(worker.serve())
        async with client:
            handle = await client.submit(greet, name="Ada")
            assert await handle.result(timeout_s=10) == "Hello, Ada"
        worker.stop()
        await served
        with pytest.raises(UsageError, match="closed"):
            await client.submit(greet, name="Bob")

    asyncio.run(begin_and_end())
    asyncio.run(begin_and_end())


async def test_what_a_client_answers_can_be_returned_by_a_route_of_fastapi() -> None:
    app = FastAPI()

    @app.get("/counts")
    async def counts() -> QueueCounts:
        return await queue.client.counts()

    @app.get("/jobs/{job_id}")
    async def job(job_id: str) -> JobInfo | None:
        return await queue.client.get(job_id)

    @app.get("/jobs/{job_id}/events")
    async def events(job_id: str) -> list[Event]:
        return [event async for event in queue.client.handle(job_id).events()]

    @app.get("/jobs")
    async def untyped():  # type: ignore[no-untyped-def]
        return await queue.client.find()

    async with serving(greet) as queue:
        handle = await queue.client.submit(greet, name="Ada")
        await handle.result(timeout_s=5)
        assert (await answer(app, "/counts"))["done"] == 1
        shown = await answer(app, f"/jobs/{handle.id}")
        assert (shown["state"], shown["result"], shown["error"]) == ("done", "Hello, Ada", None)
        assert (await answer(app, f"/jobs/{handle.id}/events"))[-1]["state"] == "done"
        assert [each["id"] for each in (await answer(app, "/jobs"))["jobs"]] == [handle.id]
    properties = app.openapi()["components"]["schemas"]["JobInfo"]["properties"]
    assert "scheduled" in properties["state"]["enum"]


async def answer(app: FastAPI, path: str) -> Any:
    """The JSON that a GET is answered with."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    await app(scope, receive, send)
    return json.loads(b"".join(message.get("body", b"") for message in sent))


async def test_a_search_refuses_what_finds_nothing() -> None:
    async with Client("memory://searching") as client:
        with pytest.raises(UsageError, match="no state 'finished'; the states are waiting, "):
            await client.find(state="finished")  # type: ignore[arg-type]
        for limit in (0, -1):
            with pytest.raises(UsageError, match="at least 1"):
                await client.find(limit=limit)


async def test_the_result_of_a_long_chain_is_awaited_no_longer_than_asked() -> None:
    async with Client("memory://long-chain") as client:
        handle = await client.chain(*[greet.call(name="Ada")] * 1_500)
        async with asyncio.timeout(30):
            with pytest.raises(Timeout, match=r"@1499\.0 had not ended after 0.2 s"):
                await handle.result(timeout_s=0.2)


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
