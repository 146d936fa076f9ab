"""Receivers that are written from the contract's text alone, fed by a real inbox and its worker.

They know one secret and read one signature, also while a secret is being rotated.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tenure import NewJob, Worker, open_queue, task
from tenure.core.outcome import Failure, Outcome
from tenure.egress import Client, Guard, Policy
from tenure.store.embedded import locate_node
from tenure.vault import Secret
from tenure.webhooks.deliver import RETRY, delivery_handler
from tests.waiting import until

HERE = Path(__file__).parent
OLD, NEW = "the older secret, long enough", "the newer secret, long enough"


class Rotated:
    """The live secrets of all requesters, newest first."""

    def __init__(self, *live: str) -> None:
        self.secrets = live

    async def live(self, requester_id: str) -> Sequence[Secret]:
        return [Secret(one.encode()) for one in self.secrets]


class Receiver:
    """A receiver in a process of its own, and what it said of each delivery."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.said: list[dict[str, Any]] = []

    def statuses(self, verdict: str = "accepted") -> list[str]:
        return [one["status"] for one in self.said if one["verdict"] == verdict]


Start = Callable[[str], AbstractAsyncContextManager[Receiver]]


@pytest.fixture(params=["python", "node"])
def start(request: pytest.FixtureRequest) -> Start:
    if request.param == "python":
        command = [sys.executable, str(HERE / "contract_receiver.py")]
    else:
        command = [str(locate_node()), str(HERE / "contract_receiver.mjs")]

    @asynccontextmanager
    async def started(secret: str) -> AsyncIterator[Receiver]:
        process = await asyncio.create_subprocess_exec(
            *command, env={"SECRET": secret}, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            first = (await process.stdout.readline()).decode()
        receiver = Receiver(first.rpartition(" ")[2].strip())

        async def read(lines: asyncio.StreamReader) -> None:
            async for line in lines:
                receiver.said.append(json.loads(line))

        reading = asyncio.create_task(read(process.stdout))
        try:
            yield receiver
        finally:
            process.kill()
            await process.wait()
            await reading

    return started


class Inbox:
    """An inbox on SQLite, whose outbox is delivered by a worker."""

    def __init__(self, folder: Path, secrets: Rotated) -> None:
        self.url = f"inbox+sqlite:///{folder}/jobs.db?synchronous=normal"
        self.queue = open_queue(self.url, worker_id="w1")
        self.client = Client(Guard(Policy(allow=("127.0.0.1/32",))))
        handler = task("webhook", retry=RETRY)(delivery_handler(self.client, secrets))
        self.worker = Worker([handler], queues=[f"{self.url}&box=outbox"], concurrency=5)
        self.serving = asyncio.create_task(self.worker.serve())

    async def run(self, receiver: Receiver, job_id: str, *kinds: str) -> None:
        """One job whose attempts end in these ways."""
        options = {"status_webhook_url": f"{receiver.url}/hook"}
        new = NewJob(task="t", payload=b"{}", job_id=job_id, requester="acme", options=options)
        await self.queue.submit([new])
        for kind in kinds:
            (lease,) = await self.queue.claim(1, wait_ms=5_000)
            failure = None if kind == "complete" else Failure(code="broken", message="it broke")
            await self.queue.settle([Outcome(lease, kind, b"{}", failure)])  # type: ignore[arg-type]

    async def close(self) -> None:
        self.worker.stop(at_once=True)
        await self.serving
        await self.queue.close()
        await self.client.close()


@pytest.fixture
async def secrets() -> Rotated:
    return Rotated(OLD)


@pytest.fixture
async def inbox(tmp_path: Path, secrets: Rotated) -> AsyncIterator[Inbox]:
    made = Inbox(tmp_path, secrets)
    yield made
    await made.close()


@pytest.mark.clause("I-36", "I-47")
async def test_every_step_of_a_job_is_accepted_once_and_in_order(
    start: Start, inbox: Inbox
) -> None:
    async with start(OLD) as receiver:
        await inbox.run(receiver, "retried", "retry", "complete")
        steps = ["claimed", "failed", "queued", "claimed", "succeeded"]
        await until(lambda: len(receiver.said) >= len(steps), "all events have come")
        await inbox.run(receiver, "given-up", "bury")
        steps += ["claimed", "failed", "dead_letter"]
        await until(lambda: len(receiver.said) >= len(steps), "all events have come")
        assert receiver.statuses() == steps
        assert len(receiver.said) == len(steps)


@pytest.mark.clause("I-43", "I-47")
async def test_a_receiver_with_one_secret_accepts_all_through_a_rotation(
    start: Start, inbox: Inbox, secrets: Rotated
) -> None:
    steps = ["claimed", "succeeded"]
    async with start(OLD) as before, start(NEW) as after:
        for live in ((OLD,), (NEW, OLD)):
            secrets.secrets = live
            before.said.clear()
            await inbox.run(before, f"old-{len(live)}", "complete")
            await until(lambda: len(before.statuses()) == 2, "the older secret is accepted")
            assert before.statuses() == steps
            assert before.statuses("forged") == []
        for live in ((NEW, OLD), (NEW,)):
            secrets.secrets = live
            after.said.clear()
            await inbox.run(after, f"new-{len(live)}", "complete")
            await until(lambda: len(after.statuses()) == 2, "the newer secret is accepted")
            assert after.statuses() == steps
            # The first delivery shows which secret it knows.
            assert len(after.statuses("forged")) == (1 if OLD in live else 0)
