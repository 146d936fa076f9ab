"""The client in plain calls: the same answers and errors, from any thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tenure import Job, JobFailed, Timeout, Worker, task
from tenure.core.errors import InvalidJob, NotFound, UsageError
from tenure.sync import Client
from tenure.worker import Settings

URL = "memory://sync"


@task("greet")
async def greet(name: str) -> str:
    return f"Hello, {name}"


@task("talk")
async def talk(job: Job, words: list[str]) -> int:
    for word in words:
        await job.report(type="token", data={"text": word})
    return len(words)


@task("break")
def broken() -> None:
    raise ValueError("no")


@pytest.fixture
def client() -> Iterator[Client]:
    worker = Worker([greet, talk, broken], queues=[URL], settings=Settings(concurrency=8))
    serving = threading.Thread(target=lambda: asyncio.run(worker.serve()))
    serving.start()
    try:
        with Client(URL) as client:
            yield client
    finally:
        worker.stop()
        serving.join(10)


def test_submit_and_await_in_plain_calls(client: Client) -> None:
    handle = client.submit(greet, name="Ada")
    assert handle.result(timeout_s=10) == "Hello, Ada"
    assert handle.status().state == "done"
    assert client.handle(handle.id, greet).result() == "Hello, Ada"
    found = client.get(handle.id)
    assert found is not None
    assert found.payload == {"name": "Ada"}
    assert client.find(state="done", task=greet).jobs[0].id == handle.id
    assert client.counts().done >= 1


def test_errors_are_those_of_the_asynchronous_client(client: Client) -> None:
    with pytest.raises(InvalidJob):
        client.submit(greet, nmae="Ada")  # type: ignore[call-overload]
    with pytest.raises(JobFailed, match="no") as failed:
        client.submit(broken.call(), attempts=1).result(timeout_s=10)
    assert "raise ValueError" in failed.value.traceback
    with pytest.raises(NotFound):
        client.handle("no-such-job").cancel()
    client.pause()
    with pytest.raises(Timeout):
        client.submit(greet, name="Ada").result(timeout_s=0.05)
    client.resume()


def test_events_are_a_plain_iterator(client: Client) -> None:
    handle = client.submit(talk, words=["a", "b"])
    events = list(handle.events())
    assert [event.data["text"] for event in events if event.type == "token"] == ["a", "b"]
    assert events[-1].state == "done"
    for _ in handle.events():
        break  # a reader may leave early


def test_a_closed_client_may_be_entered_again() -> None:
    own = Client("memory://sync-again")
    for _ in range(2):
        with own:
            assert own.counts().waiting == 0
        with pytest.raises(UsageError, match="closed"):
            own.counts()


def test_many_threads_share_one_client(client: Client) -> None:
    def ask(number: int) -> str:
        return client.submit(greet, name=str(number)).result(timeout_s=10)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(100))) == [f"Hello, {number}" for number in range(100)]
    handles = client.submit_many([greet.call(name=str(number)) for number in range(10)])
    assert [each.result(timeout_s=10) for each in handles] == [f"Hello, {n}" for n in range(10)]
    loops = [each for each in threading.enumerate() if each.name == "tenure-sync"]
    assert len(loops) == 1


def test_a_forked_child_has_a_loop_of_its_own(client: Client) -> None:
    handle = client.submit(greet, name="Ada")
    handle.result(timeout_s=10)
    child = os.fork()
    if not child:  # the queue in memory is the child's own copy
        try:
            answered = client.get(handle.id) is not None
        except BaseException:
            answered = False
        os._exit(0 if answered else 1)
    assert os.waitpid(child, 0)[1] == 0
