"""One slow receiver holds up neither another endpoint nor another requester."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from tenure import NewJob, Worker, task
from tenure.core.outcome import Outcome
from tenure.core.seam import Queue
from tenure.egress import Client, Guard, Policy
from tenure.vault import Secret
from tenure.webhooks.deliver import RETRY, delivery_handler
from tests.contract.inbox_stage import InboxStage
from tests.waiting import until

SLOW_S = 5.0
LOOKED_AT_S = SLOW_S + 2  # until the slow ones have been sent their second events
_numbers = itertools.count(1)


class OneSecret:
    async def live(self, requester_id: str) -> Sequence[Secret]:
        return [Secret(b"one secret for all requesters")]


class Receiver:
    """Answers `/slow` after five seconds and everything else at once; notes when events came."""

    def __init__(self) -> None:
        self.url = ""
        self.delays_s: list[float] = []
        self.slow = self.slow_at_once = self.slow_most = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r")[0])
                event = msgspec.json.decode(await reader.readexactly(length))
                if head.startswith(b"POST /slow"):
                    await self._hold()
                else:
                    self.delays_s.append(time.time() - event["occurred_ms"] / 1000)
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _hold(self) -> None:
        self.slow += 1
        self.slow_at_once += 1
        self.slow_most = max(self.slow_most, self.slow_at_once)
        try:
            await asyncio.sleep(SLOW_S)
        finally:
            self.slow_at_once -= 1


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.answer, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield receiver
    server.close()


@asynccontextmanager
async def delivering(url: str) -> AsyncIterator[None]:
    client = Client(Guard(Policy(allow=("127.0.0.1/32",))))
    handler = task("webhook", retry=RETRY)(delivery_handler(client, OneSecret()))
    worker = Worker([handler], queues=[url], concurrency=5)
    serving = asyncio.create_task(worker.serve())
    try:
        yield
    finally:
        worker.stop(at_once=True)
        await serving
        await client.close()


async def events(queue: Queue, requester: str, url: str, count: int = 1) -> None:
    """So many events to this endpoint: of jobs that are claimed and released."""
    options = {"status_webhook_url": url}
    names = [f"{requester}-{next(_numbers)}" for _ in range(count)]
    await queue.submit(
        [
            NewJob(task="t", payload=b"{}", job_id=name, requester=requester, options=options)
            for name in names
        ]
    )
    left = count
    while left:
        leases = await queue.claim(left, wait_ms=1_000)
        await queue.settle([Outcome(lease, "complete", b"{}") for lease in leases])
        left -= len(leases)


@pytest.mark.few
@pytest.mark.timeout(120)
@pytest.mark.clause("I-49")
@pytest.mark.options(lease_ms=30_000)
@pytest.mark.parametrize("slow_endpoints", [1, 8])
async def test_forty_events_to_slow_receivers_delay_no_healthy_one(
    inbox: InboxStage, slow_endpoints: int
) -> None:
    queue = inbox.queue("w1")
    async with receiving() as receiver, delivering(f"{inbox.url}&box=outbox"):
        for n in range(slow_endpoints):
            await events(queue, "slow", f"{receiver.url}/slow/{n}", 40 // slow_endpoints)
        await until(lambda: receiver.slow > 0, "the slow receiver holds its first event")
        sent = 0
        until_s = time.monotonic() + LOOKED_AT_S
        while time.monotonic() < until_s:
            await events(queue, "healthy", f"{receiver.url}/healthy")
            sent += 2  # claimed and succeeded
            await asyncio.sleep(0.1)  # the pace of the healthy requester's jobs
        await until(lambda: len(receiver.delays_s) >= sent, "all healthy events", within_s=60)
    delays = sorted(receiver.delays_s)
    assert delays[round(len(delays) * 0.99) - 1] < 2, delays[-10:]
    assert 0 < receiver.slow_most < 5
    assert receiver.slow > 2  # the slow ones go on, too


@pytest.mark.few
@pytest.mark.timeout(120)
@pytest.mark.clause("I-49")
@pytest.mark.options(lease_ms=30_000)
@pytest.mark.parametrize("slow_origins", [4, 8])
async def test_a_worker_that_starts_on_a_slow_backlog_delays_no_tenant_it_has_not_met(
    inbox: InboxStage, slow_origins: int
) -> None:
    queue = inbox.queue("w1")
    async with AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(receiving()) for _ in range(slow_origins)]
        for n, each in enumerate(slow):
            await events(queue, f"slow{n % 2}", f"{each.url}/slow", 40 // slow_origins)
        healthy = await stack.enter_async_context(receiving())
        await stack.enter_async_context(delivering(f"{inbox.url}&box=outbox"))
        await until(lambda: any(each.slow for each in slow), "a slow receiver holds an event")
        sent = 0
        until_s = time.monotonic() + LOOKED_AT_S
        while time.monotonic() < until_s:
            await events(queue, f"new-{sent}", f"{healthy.url}/{sent}")
            sent += 2  # claimed and succeeded
            await asyncio.sleep(0.25)  # the pace of the new tenants
        await until(lambda: len(healthy.delays_s) >= sent, "all healthy events", within_s=60)
    delays = sorted(healthy.delays_s)
    assert delays[round(len(delays) * 0.99) - 1] < 2, delays[-10:]
    assert sum(each.slow for each in slow) > 4  # the slow ones go on, too


@pytest.mark.clause("I-49")
async def test_a_quick_receiver_may_use_nearly_all_requests_at_once(inbox: InboxStage) -> None:
    queue = inbox.queue("w1")
    async with receiving() as receiver, delivering(f"{inbox.url}&box=outbox"):
        await events(queue, "quick", f"{receiver.url}/quick", 60)
        await until(lambda: len(receiver.delays_s) == 120, "all events", within_s=30)
    assert max(receiver.delays_s) < 20
